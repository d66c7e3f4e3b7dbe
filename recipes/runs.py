"""One timed run of prompts by an engine, and the row that it leaves."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.bench.evidence import Row
from outrider.core.types import Sampling
from outrider.engine.engine import Engine
from outrider.engine.output import Output
from recipes.questions import Question

PARTS = ("target", "drafter", "rows", "verify", "commit")
"""What the profile of a run names, of the parts of a step."""


@dataclass(frozen=True, kw_only=True)
class PromptBatch:
    """Prompts that run together, and their seed."""

    questions: tuple[Question, ...]
    seed: int = 0

    @property
    def name(self) -> str:
        """Unique among the jobs of a measurement."""
        return f"{self.prompt}, seed {self.seed}"

    @property
    def prompt(self) -> str:
        """The names of all prompts."""
        return "+".join(question.id for question in self.questions)

    @property
    def prompts(self) -> list[list[int]]:
        """Token ids of all prompts."""
        return [list(question.tokens) for question in self.questions]


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """How a job is to be done, whoever does it.

    Attributes:
        max_new_tokens: Most tokens of each output.
        ignore_eos: Whether outputs go on behind end tokens, so that all are as long.
    """

    max_new_tokens: int
    temperature: float = 1.0
    ignore_eos: bool = False

    def samplings(self, job: PromptBatch) -> list[Sampling]:
        """One for each prompt: the i-th is drawn with 1000 times the job's seed and i."""
        seeds = [1000 * job.seed + i for i in range(len(job.questions))]
        return [Sampling(temperature=self.temperature, seed=seed) for seed in seeds]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run gave.

    Attributes:
        seconds: Of the whole run, from a cold cache, prompts included.
    """

    seconds: float
    outputs: Sequence[Output] = field(repr=False)

    @property
    def tokens(self) -> list[list[int]]:
        """Output of each prompt."""
        return [output.tokens for output in self.outputs]


def on_engine(engine: Engine, job: PromptBatch, conditions: Conditions, *, columns: int | None = None) -> RunResult:
    """Run a job on an engine, from a cold cache.

    Args:
        columns: Fewest columns of the target's forwards during the run; None leaves them.
    """
    target: Any = engine.parts.target
    padded = target.pad_to
    engine.rest()
    target.pad_to = padded if columns is None else columns
    try:
        began = time.perf_counter()
        outputs = engine.generate(
            job.prompts,
            max_new_tokens=conditions.max_new_tokens,
            sampling=conditions.samplings(job),
            ignore_eos=conditions.ignore_eos,
        )
        seconds = time.perf_counter() - began
        engine.rest()
    finally:
        target.pad_to = padded
    return RunResult(seconds=seconds, outputs=outputs)


def as_row(
    run: RunResult,
    method: str,
    job: PromptBatch,
    conditions: Conditions,
    *,
    deepest: int = 0,
    labels: Mapping[str, Any] | None = None,
) -> Row:
    """A run as a line of `rows.jsonl`; counts are summed over its requests, iterations and seconds are the run's.

    `seconds` are the whole run's, prefill included. `stepping` are those of its steps, by the step's own clock, without
    each request's first step, which may prefill a prompt; `stepped` are the tokens of the same steps, and `profile`
    parts them. `free_tokens` and `free_steps` count the steps that began with room for `deepest` draft tokens.
    """
    outputs = run.outputs
    steps = [step for output in outputs for step in output.steps]
    timings = {id(step.timing): step.timing for step in steps}.values()
    first = {id(output.steps[0].timing) for output in outputs if output.steps}
    later = [timing for timing in timings if id(timing) not in first]
    behind = [step for step in steps if id(step.timing) not in first]
    free = [count for output in outputs for count in _free(output, conditions.max_new_tokens - deepest)]
    return {
        "method": method,
        **(labels or {}),
        "temperature": conditions.temperature,
        "prompt": job.prompt,
        "category": job.questions[0].category if len(job.questions) == 1 else "several",
        "seed": job.seed,
        "requests": len(job.questions),
        "prompt_tokens": sum(len(question.tokens) for question in job.questions),
        "tokens": sum(map(len, run.tokens)),
        "seconds": run.seconds,
        "digest": hashlib.sha256(json.dumps(run.tokens).encode()).hexdigest()[:16],
        "steps": len(steps),
        "iterations": len(timings),
        "drafted": sum(output.num_draft_tokens for output in outputs),
        "accepted": sum(output.num_accepted_tokens for output in outputs),
        "free_tokens": sum(free),
        "free_steps": len(free),
        "stepping": sum(timing.total for timing in later),
        "stepped": sum(len(step.tokens) for step in behind),
        "later_steps": len(behind),
        "profile": {part: sum(getattr(timing, part) for timing in later) for part in PARTS},
    }


def _free(output: Output, before: int) -> list[int]:
    """Tokens of each step that began before the output had as many tokens."""
    counts, emitted = [], 0
    for step in output.steps:
        if emitted < before:
            counts.append(len(step.tokens))
        emitted += len(step.tokens)
    return counts
