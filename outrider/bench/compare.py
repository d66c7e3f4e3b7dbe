"""Speculative against plain decoding of the same prompts, side by side: medians of interleaved runs."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outrider.engine.engine import Engine
from outrider.engine.output import Output
from outrider.lm.model import LanguageModel
from outrider.lm.recurrent import RecurrentModel
from outrider.types import Sampling


@dataclass(frozen=True, kw_only=True)
class Run:
    """One timed pass over all prompts."""

    configuration: str
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What the runs say.

    Attributes:
        outputs: Of the first speculative run.
        runs: Every timed run.
    """

    outputs: list[Output]
    runs: list[Run]

    def median(self, configuration: str) -> float:
        """Median tokens per second."""
        return statistics.median(r.tokens_per_second for r in self.runs if r.configuration == configuration)

    @property
    def plain(self) -> str:
        """The fastest of the configurations that draft nothing."""
        return max({r.configuration for r in self.runs if r.configuration != "speculative"}, key=self.median)

    @property
    def speedup(self) -> float:
        return self.median("speculative") / self.median(self.plain)


def compare(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    rounds: int = 3,
    progress: Callable[[], None] | None = None,
) -> Comparison:
    """Decode with the drafter, without it, and with transformers' generate, in turn, `rounds` times after a warm-up.

    Prefill is part of every run and nothing is kept warm between runs. Where padding single tokens to two columns is
    on, plain decoding is also timed without it.
    """
    target = engine.parts.target
    if not isinstance(target, LanguageModel | RecurrentModel):
        raise TypeError("only a real language model can be timed")
    padding = target.pad_to
    paddings = sorted({1, padding})
    outputs: list[Output] = []
    runs: list[Run] = []
    for round_ in range(rounds + 1):
        began = time.perf_counter()
        made = engine.generate(prompts, max_new_tokens=max_new_tokens, sampling=sampling)
        timed = [_run("speculative", sum(len(output.tokens) for output in made), began)]
        engine.rest()
        plain = engine.plain()
        for columns in paddings:
            target.pad_to = columns
            began = time.perf_counter()
            plain_outputs = plain.generate(prompts, max_new_tokens=max_new_tokens, sampling=sampling)
            timed.append(_run(f"plain, {columns} columns", sum(len(o.tokens) for o in plain_outputs), began))
            plain.rest()
        target.pad_to = padding
        if engine.max_slots == 1 or len(prompts) == 1:
            timed.append(_transformers(engine, target, prompts, max_new_tokens, sampling))
        if round_ > 0:
            runs += timed
        outputs = outputs or made
        if progress is not None:
            progress()
    return Comparison(outputs=outputs, runs=runs)


def _run(configuration: str, tokens: int, began: float) -> Run:
    return Run(configuration=configuration, tokens=tokens, seconds=time.perf_counter() - began)


def _transformers(
    engine: Engine,
    target: LanguageModel | RecurrentModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
) -> Run:
    """transformers' own loop, one prompt after another."""
    tokens = 0
    options: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        options = {"do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k or None}
    began = time.perf_counter()
    for prompt in prompts:
        ids = torch.tensor([list(prompt)]).to(target.device)
        said = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=min(max_new_tokens, target.max_context - len(prompt)),
            eos_token_id=sorted(engine.eos_ids) or None,
            **options,
        )
        tokens += said.shape[1] - ids.shape[1]
    return _run("transformers generate", tokens, began)
