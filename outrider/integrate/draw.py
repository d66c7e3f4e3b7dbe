"""Run rows to their ends, and build the result of `generate`."""

import torch
from jaxtyping import Int
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from outrider.core.types import InputError
from outrider.decoding.protocol import NoDistribution
from outrider.engine.engine import Engine
from outrider.engine.output import succeeded
from outrider.integrate.batch import GenerateBatch
from outrider.integrate.columns import Columns


def draw(engine: Engine, batch: GenerateBatch, streamer: BaseStreamer | None) -> Columns:
    """Run all rows to their ends. The engine keeps none of them, even after an error."""
    _check_room(engine, batch)
    columns = Columns(batch=batch, streamer=streamer)
    rows = range(len(batch.input_ids))
    if streamer is not None:
        streamer.put(batch.input_ids.cpu())
    try:
        for row, seed in zip(rows, _seeds(batch), strict=True):
            engine.add(batch.request(row, seed))
        while engine.busy:
            for update in map(succeeded, engine.step(columns.keep_logits)):
                columns.add(int(update.id), update.tokens, update.output is not None)
            columns.settle()
            for row in rows if columns.complete else columns.padded:
                engine.cancel(str(row))
    except NoDistribution as error:
        raise InputError(
            "the logits processors leave no token that could come, or scores that are no numbers"
        ) from error
    finally:
        for row in rows:
            engine.cancel(str(row))
    if streamer is not None:
        streamer.end()
    return columns


def _check_room(engine: Engine, batch: GenerateBatch) -> None:
    most = batch.max_new_tokens
    longest, context = batch.input_ids.shape[1] - min(batch.padding), engine.parts.target.max_context
    if longest + most > context:
        fewer = f"give max_new_tokens={context - longest} or less" if longest < context else "give a shorter prompt"
        raise InputError(
            f"a prompt of {longest} tokens and {most} new ones pass the context of {context}; "
            f"{fewer}; or, if model and memory allow it, a larger max_context or fewer max_slots"
        )


def _seeds(batch: GenerateBatch) -> list[int]:
    """A seed per row, from torch's global generator. Greedy decoding draws none, as in `generate`."""
    count = len(batch.input_ids)
    return torch.randint(2**62, (count,)).tolist() if batch.config.do_sample else list(range(count))


def result(columns: Columns) -> GenerateDecoderOnlyOutput | Int[Tensor, "rows longer"]:
    """What `generate` returns."""
    config = columns.batch.config
    if not config.return_dict_in_generate:
        return columns.sequences
    return GenerateDecoderOnlyOutput(
        sequences=columns.sequences,
        scores=tuple(columns.scores) if columns.batch.keeps_scores else None,
        logits=tuple(columns.raw) if config.output_logits else None,
    )
