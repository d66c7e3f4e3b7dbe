"""A stream of requests that a draft model learns from, and how draft models do along its outputs."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

import outrider
from outrider.bench.evidence import Row
from outrider.core.types import InputError, Sampling
from outrider.training.data.records import read_documents
from outrider.training.data.sources import records
from outrider.training.online.learning import Learning
from outrider.training.online.pupil import OnlineSettings
from outrider.training.online.weights import model_of
from recipes.trained import PROMPT, covered, draft_of_text, short_run

DEPTH = 4
"""Tokens of a draft."""
FROZEN, LEARNING = ARMS = ("frozen", "learning")
OPENING = 512
"""Characters of a text that are read for its prompt."""
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
"""Of a draft model that is trained here; that of `recipes/small_draft`."""
LENGTH = 128
"""Tokens of a text that it is trained on."""


@dataclass(frozen=True, kw_only=True)
class Stream:
    """How a stream of requests is served.

    Attributes:
        domains: Prompts by domain, in the order in which the domains come.
        target: Directory or hub id.
        draft: Directory of the draft model.
        max_new_tokens: Most tokens of an output.
        interval: Requests that run at once; after them comes one optimizer step.
        learning_rate: Of AdamW.
        margin: As `OnlineSettings` has it.
    """

    domains: dict[str, list[list[int]]]
    target: str
    draft: Path
    max_new_tokens: int
    interval: int
    learning_rate: float
    margin: float

    def waves(self, seed: int) -> Iterator[tuple[str, int, list[int]]]:
        """Domain, place of the first request, and numbers of the prompts that run at once, in the order of a seed."""
        for domain, prompts in self.domains.items():
            order = np.random.default_rng([seed, len(prompts)]).permutation(len(prompts)).tolist()
            for begin in range(0, len(order), self.interval):
                yield domain, begin, order[begin : begin + self.interval]

    def served(self, temperature: int, seed: int, target: PreTrainedModel, done: Callable[[], None]) -> Row:
        """Serve all requests, and judge each with both draft models.

        Args:
            target: The target in float32, to judge with.
            done: Called after each wave.
        """
        engine = outrider.load(
            self.target,
            drafter=f"model:path={self.draft}",
            length=f"fixed:{DEPTH}",
            verifier="token",
            max_slots=self.interval,
            dtype="float32",
        )
        settings = OnlineSettings(interval=self.interval, learning_rate=self.learning_rate, margin=self.margin)
        learning = Learning(engine, settings)
        pupil = learning.pupils[0]
        arms = {arm: _copied(model_of(pupil.draft.drafter)) for arm in ARMS}
        each: list[Row] = []
        for domain, begin, numbers in self.waves(seed):
            # All requests of a wave begin together, with these weights.
            _overwrite(arms[LEARNING], model_of(pupil.draft.drafter))
            first = 1_000_003 * seed + 1_009 * len(each)
            drawn = [Sampling(temperature=float(temperature), seed=first + i) for i in range(len(numbers))]
            prompts = [self.domains[domain][number] for number in numbers]
            outputs = engine.generate(prompts, max_new_tokens=self.max_new_tokens, sampling=drawn)
            told = judged(target, arms, prompts, [output.tokens for output in outputs], temperature)
            for i, (number, output) in enumerate(zip(numbers, outputs, strict=True)):
                row: Row = {"prompt": f"{domain} {number}", "category": domain, "place": begin + i}
                row |= {"drafted": output.num_draft_tokens, "accepted": output.num_accepted_tokens}
                each.append(row | told[i])
            done()
        learning.finish()
        return {"rounds": pupil.draft.num_rounds, "rollbacks": pupil.num_rollbacks, "each": each}


def _copied(model: PreTrainedModel) -> PreTrainedModel:
    with torch.inference_mode(False):
        return copy.deepcopy(model).float().requires_grad_(False)


def _overwrite(model: PreTrainedModel, newest: PreTrainedModel) -> None:
    with torch.inference_mode(False), torch.no_grad():
        for own, other in zip(model.parameters(), newest.parameters(), strict=True):
            own.copy_(other)


@torch.no_grad()
def judged(
    target: PreTrainedModel,
    drafts: Mapping[str, PreTrainedModel],
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    temperature: int,
) -> list[dict[str, Row]]:
    """How draft models do along outputs of the target: for each output, the figures of each draft model.

    `tokens` and `steps` are expected ones, `first` is the sum over `places` of the chance that a draft token there is
    accepted. An output without room for a draft counts nothing, so that each prompt has figures with each seed.

    Args:
        temperature: 0 or 1, at which the target wrote the outputs.
    """
    texts = [torch.tensor([*prompt, *output]) for prompt, output in zip(prompts, outputs, strict=True)]
    # What stands behind a text changes no row of it.
    tokens = pad_sequence(texts, batch_first=True)
    theirs = _log_rows(target, tokens)
    found: list[dict[str, Row]] = [{} for _ in texts]
    for name, draft in drafts.items():
        ours = _log_rows(draft, tokens)
        if temperature == 0:
            chances = (ours.argmax(-1) == theirs.argmax(-1)).double()
        else:
            log_q, log_p = (rows.gather(-1, tokens[:, 1:, None])[..., 0].double() for rows in (ours, theirs))
            chances = (log_q - log_p).clamp(max=0).exp()
        for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            found[i][name] = _figures(chances[i, len(prompt) - 1 : len(text) - 1].numpy())
    return found


def _log_rows(model: PreTrainedModel, tokens: Int[Tensor, "texts length"]) -> Float[Tensor, "texts places vocab"]:
    return model(input_ids=tokens[:, :-1], use_cache=False).logits.log_softmax(-1)


def _figures(chances: Float[np.ndarray, " output"]) -> Row:
    if len(chances) < DEPTH + 1:
        return {"tokens": 0.0, "steps": 0.0, "first": 0.0, "places": 0}
    windows = np.lib.stride_tricks.sliding_window_view(chances, DEPTH)
    told = covered(windows)
    return {"tokens": told.tokens, "steps": told.steps, "first": float(windows[:, 0].sum()), "places": len(windows)}


def openings(data: Path, domains: Sequence[str], count: int, tokenizer: Any) -> dict[str, list[list[int]]]:
    """The first tokens of texts of each domain, drawn from all that are long enough.

    Raises:
        InputError: A domain has too few texts.
    """
    if tokenizer is None:
        raise InputError("there is no tokenizer beside the target, so no text can be read; put one into its folder")
    opened: dict[str, set[tuple[int, ...]]] = {domain: set() for domain in domains}
    for record in records(data):
        domain, text = record.fields.get("domain"), record.fields.get("text")
        if domain in opened and isinstance(text, str):
            tokens = tokenizer(text[:OPENING])["input_ids"][:PROMPT]
            if len(tokens) == PROMPT:
                opened[domain].add(tuple(tokens))
    for domain, found in opened.items():
        if len(found) < count:
            raise InputError(
                f"{data} has {len(found)} different openings of {PROMPT} tokens of the domain {domain!r}, and "
                f"{count} are needed; give more text, --domains or --requests"
            )
    drawn = {}
    for domain, found in opened.items():
        texts = sorted(found)
        chosen = np.random.default_rng(0).permutation(len(texts))[:count].tolist()
        drawn[domain] = [list(texts[i]) for i in chosen]
    return drawn


def outsider(place: Path, data: Path, domains: Sequence[str], steps: int, tokenizer: Any) -> Path:
    """A draft model that has learnt the texts of all other domains by their own tokens; its folder.

    Args:
        place: The folder. A model that an earlier run has trained there is not trained again.
        domains: What it must not have read.
        steps: Optimizer steps of 16 rows.

    Raises:
        InputError: There is no text of another domain.
    """
    if (place / "config.json").is_file():
        return place
    texts = [each for each in read_documents(data, tokenizer, max_tokens=LENGTH) if each.domain not in domains]
    if not texts:
        raise InputError(f"{data} has no text of another domain than {', '.join(domains)}; leave out --text-steps")
    return draft_of_text(place, texts, short_run(0, steps, 16, LENGTH, 3e-3), SHAPE)
