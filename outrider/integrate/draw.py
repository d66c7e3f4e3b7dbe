"""Rows run to their ends, and put together as `generate` returns them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from outrider.engine import Engine, succeeded
from outrider.integrate.batch import Batch
from outrider.types import InputError, Request, Step


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What one row came to: its new tokens and, if wanted, the raw logits that they were drawn from."""

    tokens: list[int] = field(default_factory=list)
    logits: list[Float[Tensor, "n vocab"]] = field(default_factory=list)


def draw(engine: Engine, batch: Batch, streamer: BaseStreamer | None) -> list[Drawn]:
    """Run all rows to their ends."""
    drawn = [Drawn() for _ in batch.input_ids]
    most = batch.max_new_tokens
    longest, context = batch.input_ids.shape[1] - min(batch.padding), engine.parts.target.max_context
    if longest + most > context:
        raise InputError(
            f"a prompt of {longest} tokens and {most} new ones pass the context of {context}; "
            f"give max_new_tokens={max(context - longest, 0)} or less; or, if model and memory allow it, a larger "
            "max_context or fewer max_slots"
        )
    _run(engine, [batch.request(i, [], most, seed) for i, seed in enumerate(_seeds(batch))], drawn, streamer)
    end = max(len(row.tokens) for row in drawn)
    if not batch.pads and any(len(row.tokens) < end for row in drawn):
        late = [
            replace(batch.request(i, row.tokens, end - len(row.tokens), seed), ends=None)
            for i, (row, seed) in enumerate(zip(drawn, _seeds(batch), strict=True))
            if len(row.tokens) < end
        ]
        _run(engine, late, drawn, None)
    return drawn


def _run(engine: Engine, requests: Sequence[Request], drawn: Sequence[Drawn], streamer: BaseStreamer | None) -> None:
    """Run requests, whose ids are their rows, and add what they give to what was drawn."""

    def keep(step: Step) -> None:
        if step.logits is not None:
            drawn[int(step.request)].logits.append(step.logits)

    for request in requests:
        engine.add(request)
    while engine.busy:
        for update in map(succeeded, engine.step(keep)):
            if max(update.tokens) >= engine.parts.target.vocab_size:
                raise InputError("the logits processors leave no token that could come, or scores that are no numbers")
            drawn[int(update.id)].tokens.extend(update.tokens)
            if streamer is not None:
                for token in update.tokens:
                    streamer.put(torch.tensor([token]))


def _seeds(batch: Batch) -> list[int]:
    """A seed per row, from torch's global generator; greedy decoding leaves that alone, as `generate` does."""
    count = len(batch.input_ids)
    return torch.randint(2**62, (count,)).tolist() if batch.config.do_sample else list(range(count))


def result(batch: Batch, drawn: Sequence[Drawn]) -> GenerateDecoderOnlyOutput | Int[Tensor, "rows longer"]:
    """What `generate` returns."""
    ids, config = batch.input_ids, batch.config
    end = max(len(row.tokens) for row in drawn)
    if any(len(row.tokens) < end for row in drawn) and config._pad_token_tensor is None:
        raise InputError("rows end at different lengths and there is no padding token; give pad_token_id")
    pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    said = torch.tensor([row.tokens + [pad] * (end - len(row.tokens)) for row in drawn], device=ids.device)
    sequences = torch.cat([ids, said.to(ids.dtype)], 1)
    if not config.return_dict_in_generate:
        return sequences
    logits = scores = None
    if batch.keeps_logits:
        by_row = [torch.cat(row.logits).to(ids.device) for row in drawn]
        whole = torch.stack([torch.nn.functional.pad(rows, (0, 0, 0, end - len(rows))) for rows in by_row], 1)
        logits = tuple(whole) if config.output_logits else None
        scores = _scores(batch, drawn, sequences, whole) if config.output_scores else None
    return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits)


def _scores(
    batch: Batch,
    drawn: Sequence[Drawn],
    sequences: Int[Tensor, "rows longer"],
    logits: Float[Tensor, "new rows vocab"],
) -> tuple[Float[Tensor, "rows vocab"], ...]:
    """The processed scores of each step, by the batch's own processors."""
    found = []
    for step, raw in enumerate(logits):
        scores = raw.clone()
        for processor in batch.processors:
            scores = processor(sequences[:, : batch.input_ids.shape[1] + step], scores)
        ended = torch.tensor([step >= len(row.tokens) for row in drawn], device=scores.device)
        found.append(scores.masked_fill(ended[:, None], 0.0))
    return tuple(found)
