"""Speculative against plain decoding of the same prompts, side by side: medians of interleaved runs."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from outrider.bench.runs import Conditions, Contender, PromptBatch, Question, RunResult, on_engine, on_transformers
from outrider.bench.side_by_side.configuration import PLAIN
from outrider.bench.turns import turns
from outrider.core.types import Sampling
from outrider.engine.engine import Engine
from outrider.lm.model import LanguageModel
from outrider.lm.recurrent import RecurrentModel

SPECULATIVE = "speculative"


@dataclass(frozen=True, kw_only=True)
class TimedRun:
    """One timed pass over all prompts."""

    configuration: str
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all outputs over the seconds of the pass."""
        return self.tokens / self.seconds


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The results of the runs."""

    runs: list[TimedRun]

    def median(self, configuration: str) -> float:
        """Median tokens per second."""
        return statistics.median(r.tokens_per_second for r in self.runs if r.configuration == configuration)

    @property
    def plain(self) -> str:
        """The fastest of the configurations that draft nothing."""
        return max({r.configuration for r in self.runs if r.configuration != SPECULATIVE}, key=self.median)

    @property
    def speedup(self) -> float:
        """Speculative over plain tokens per second."""
        return self.median(SPECULATIVE) / self.median(self.plain)


def compare(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    rounds: int = 3,
    progress: Callable[[], None] | None = None,
) -> Comparison:
    """Decode with the drafter, without it, and with transformers' generate, in turns, `rounds` times after a warm-up.

    Prefill is part of every run and nothing is kept warm between runs. Where padding single tokens to two columns is
    on, plain decoding is also timed without it.

    Args:
        progress: Called after the warm-up and after each round.
    """
    conditions = Conditions(max_new_tokens=max_new_tokens, temperature=sampling.temperature, sampling=sampling)
    asked = [Question(id=str(i), category="", tokens=tuple(prompt)) for i, prompt in enumerate(prompts)]
    job = PromptBatch(questions=tuple(asked), seed=sampling.seed or 0)
    ways = _ways(engine, conditions, len(prompts))
    runs: list[TimedRun] = []
    for way in ways:
        way.run(job)
    for turn in turns(ways, [job], rounds=rounds):
        if progress is not None and turn.round * len(ways) == len(runs):
            progress()
        made = turn.way.run(turn.job)
        runs.append(TimedRun(configuration=turn.way.name, tokens=made.num_tokens, seconds=made.seconds))
    if progress is not None:
        progress()
    return Comparison(runs=runs)


def _ways(engine: Engine, conditions: Conditions, num_prompts: int) -> list[Contender]:
    """The drafter, plain decoding in its forms, and transformers where it too takes one prompt after another."""
    target = engine.parts.target
    if not isinstance(target, LanguageModel | RecurrentModel):
        raise TypeError("only a real language model can be timed")

    def way(name: str, run: Callable[[PromptBatch], RunResult]) -> Contender:
        return Contender(name=name, temperature=conditions.temperature, run=run)

    def plain(columns: int, job: PromptBatch) -> RunResult:
        return on_engine(engine.plain(), job, conditions, columns=columns)

    def transformers(job: PromptBatch) -> RunResult:
        # One prompt after another.
        made = []
        for question in job.questions:
            room = min(conditions.max_new_tokens, target.max_context - len(question.tokens))
            alone, own = PromptBatch(questions=(question,), seed=job.seed), replace(conditions, max_new_tokens=room)
            made.append(on_transformers(target.model, alone, own, eos_ids=engine.eos_ids))
        return RunResult(
            tokens=[tokens for run in made for tokens in run.tokens], seconds=sum(run.seconds for run in made)
        )

    found = [way(SPECULATIVE, lambda job: on_engine(engine, job, conditions))]
    for columns in sorted({1, target.pad_to}):
        name = PLAIN if columns == 1 else f"{PLAIN}, {columns} columns"
        found.append(way(name, partial(plain, columns)))
    if engine.max_slots == 1 or num_prompts == 1:
        found.append(way("transformers generate", transformers))
    return found
