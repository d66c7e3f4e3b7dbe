"""Runs that take turns: what the tests of published claims are told, and how they run ways to decode side by side.

A recipe names its ways to decode as data (`Method`) and runs all of them on the same prompts with the same seeds in a
shuffled order (`Bench.measure`). `recipes.evidence` draws conclusions from the rows, `recipes.report` writes them down.
"""

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Annotated, TextIO

import torch
import typer
from rich.progress import Progress

import outrider
from outrider import InputError, Sampling
from outrider.drafters.model import ModelPath
from outrider.engine.output import Output
from outrider.load import EMBEDDED_DRAFT
from recipes.speed import PARTS, Question, Row, choose, read_prompts

PROMPTS = Path(outrider.__file__).parent / "assets" / "prompts.jsonl"

Target = Annotated[str | None, typer.Option(help="Directory or hub id of the target; by default the embedded one.")]
Draft = Annotated[Path, typer.Option(help="Directory of the draft model.")]
Prompts = Annotated[Path, typer.Option(help="JSON lines with `id`, `category`, and `prompt` or `turns`.")]
Out = Annotated[Path, typer.Option(help="Folder for the results.")]
NumPrompts = Annotated[int, typer.Option(help="How many prompts are measured.")]
Seeds = Annotated[int, typer.Option(help="How many seeds each prompt is run with.")]
Tokens = Annotated[int, typer.Option(help="Most tokens per request.")]
Threads = Annotated[int, typer.Option(help="Threads of torch.")]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What every recipe is told.

    Attributes:
        target: Directory or hub id; None is the embedded target.
        seeds: How many seeds each prompt is run with.
        max_new_tokens: Most tokens per request.
    """

    out: Path
    target: str | None = None
    draft: Path = EMBEDDED_DRAFT
    prompts: Path = PROMPTS
    num_prompts: int = 20
    seeds: int = 1
    max_new_tokens: int = 64
    threads: int = 2

    def __post_init__(self) -> None:
        for name in ("num_prompts", "seeds", "max_new_tokens", "threads"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be >= 1, got {getattr(self, name)}")
        if not (self.draft / "config.json").is_file():
            raise InputError(f"{self.draft} is not a model's directory: it has no config.json")


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to decode, as the catalog writes it.

    Attributes:
        name: Unique within a recipe.
        deepest: Deepest draft of all that it is compared with. Block efficiency is taken over the steps that begin
            with room for it, so that the end of a request cuts no draft.
        decoding: In which order to draft and verify; `plain` drafts nothing and pads nothing.
        threads: Threads of torch; None is the setting's.
        labels: What the rows say of it besides.
    """

    name: str
    tree: str = "chain"
    verifier: str = "block"
    length: str = "fixed:5"
    temperature: float = 1.0
    deepest: int = 8
    decoding: str = "step"
    threads: int | None = None
    labels: Mapping[str, str | int | float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Prompts that run together, and their seed."""

    questions: tuple[Question, ...]
    seed: int


class Bench:
    """A pair, loaded once, in as many engines as there are methods; they take turns and share the models' slots."""

    def __init__(self, setting: Setting, *, max_slots: int = 1, ignore_eos: bool = False) -> None:
        torch.set_num_threads(setting.threads)
        self.setting, self.max_slots, self.ignore_eos = setting, max_slots, ignore_eos
        drafter = ModelPath(path=str(setting.draft))
        self.first = outrider.load(setting.target, drafter=drafter, max_slots=max_slots)
        self._engines: dict[tuple[str, str, str, str], outrider.Engine] = {}

    def engine(self, method: Method) -> outrider.Engine:
        """The engine of a method."""
        if method.decoding == "plain":
            return self.first.plain()
        key = (method.tree, method.verifier, method.length, method.decoding)
        if key not in self._engines:
            parts = self.first.parts
            loaded = outrider.load(
                parts.target.model,
                drafter=parts.drafter,
                tree=method.tree,
                verifier=method.verifier,
                length=method.length,
                decoding=method.decoding,
                tokenizer=self.first.tokenizer,
                max_slots=self.max_slots,
            )
            self._engines[key] = outrider.Engine(
                replace(loaded.parts, target=parts.target),
                tokenizer=self.first.tokenizer,
                eos_ids=self.first.eos_ids,
                sampling=self.first.sampling,
                max_slots=self.max_slots,
            )
        return self._engines[key]

    def questions(self, count: int, without: Sequence[Question] = ()) -> list[Question]:
        """As many prompts of every category as of any other, from those that leave room for the output."""
        path = self.setting.prompts
        try:
            given = read_prompts(path)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}; give a file of JSON lines") from error
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path} must have an object with id, category, and prompt or turns on every line: {error!r}"
            ) from error
        longest = self.first.parts.target.max_context - self.setting.max_new_tokens
        read = [Question(id=i, category=c, tokens=tuple(self.first.encode(prompt))) for i, c, prompt in given]
        taken = {question.id for question in without}
        fitting = [q for q in read if 0 < len(q.tokens) <= longest and q.id not in taken]
        if len(fitting) < count:
            raise InputError(
                f"{path} has {len(fitting)} prompts of at most {longest} tokens left, {count} are needed; "
                "lower --num-prompts or give a longer file with --prompts"
            )
        return choose(fitting, count)

    def jobs(self, questions: Sequence[Question]) -> list[Job]:
        """Every prompt by itself, with every seed."""
        return [Job(questions=(q,), seed=seed) for seed in range(self.setting.seeds) for q in questions]

    def run(self, method: Method, job: Job, max_new_tokens: int | None = None) -> Row:
        """One run, from a cold cache to the last token, as a line of `rows.jsonl`."""
        engine = self.engine(method)
        count = len(job.questions)
        samplings = [Sampling(temperature=method.temperature, seed=1000 * job.seed + i) for i in range(count)]
        limit = max_new_tokens or self.setting.max_new_tokens
        torch.set_num_threads(method.threads or self.setting.threads)
        target = engine.parts.target
        columns = target.pad_to
        if method.decoding == "plain":
            target.pad_to = 1
        began = perf_counter()
        outputs = engine.generate(
            [list(q.tokens) for q in job.questions],
            max_new_tokens=limit,
            sampling=samplings,
            ignore_eos=self.ignore_eos,
        )
        seconds = perf_counter() - began
        engine.rest()
        target.pad_to = columns
        return row(method, job, outputs, seconds, limit)

    def measure(
        self, phase: str, methods: Sequence[Method], jobs: Sequence[Job], file: TextIO, progress: Progress
    ) -> list[Row]:
        """All methods on all jobs, jobs and methods in an order that is shuffled anew; a line of `file` per run."""
        if len({method.name for method in methods}) < len(methods):
            raise ValueError("two methods have one name")
        for method in methods:
            if method.deepest >= self.setting.max_new_tokens:
                raise InputError(
                    f"max_new_tokens must be > {method.deepest}, the deepest draft, got {self.setting.max_new_tokens}"
                )
        shuffle = random.Random(phase).sample
        warm = progress.add_task(f"{phase}: warm-up", total=len(methods))
        for method in methods:
            short = replace(jobs[0].questions[0], tokens=jobs[0].questions[0].tokens[:8])
            self.run(method, Job(questions=(short,) * len(jobs[0].questions), seed=0), max_new_tokens=8)
            progress.advance(warm)
        task = progress.add_task(phase, total=len(jobs) * len(methods))
        rows: list[Row] = []
        for job in shuffle(jobs, len(jobs)):
            for method in shuffle(methods, len(methods)):
                rows.append({"phase": phase, "order": len(rows), **self.run(method, job)})
                file.write(json.dumps(rows[-1]) + "\n")
                file.flush()
                progress.advance(task)
        return rows


def row(method: Method, job: Job, outputs: Sequence[Output], seconds: float, max_new_tokens: int) -> Row:
    """What a run gave; counts are summed over its requests, iterations and seconds are the run's.

    `seconds` are the whole run's, prefill included; `stepping` those of its steps on their own clock, which a simulated
    one is too, without those that are a request's first one, which may digest a prompt; `stepped` are the tokens of the
    same steps, and `profile` parts them.
    """
    steps = [step for output in outputs for step in output.steps]
    timings = {id(step.timing): step.timing for step in steps}.values()
    first = {id(output.steps[0].timing) for output in outputs if output.steps}
    later = [timing for timing in timings if id(timing) not in first]
    free = [count for output in outputs for count in _free(output, max_new_tokens - method.deepest)]
    deepest = max((len(output.accepted_per_position) for output in outputs), default=0)
    drafted = max((step.num_draft_tokens for step in steps), default=0) if method.tree == "chain" else 0
    return {
        "method": method.name,
        "tree": method.tree,
        "verifier": method.verifier,
        "length": method.length,
        "decoding": method.decoding,
        "temperature": method.temperature,
        **method.labels,
        "prompt": "+".join(q.id for q in job.questions),
        "category": job.questions[0].category if len(job.questions) == 1 else "several",
        "seed": job.seed,
        "requests": len(outputs),
        "prompt_tokens": sum(output.prompt_tokens for output in outputs),
        "tokens": sum(len(output.tokens) for output in outputs),
        "steps": len(steps),
        "iterations": len(timings),
        "drafted": sum(output.num_draft_tokens for output in outputs),
        "accepted": sum(output.num_accepted_tokens for output in outputs),
        "free_tokens": sum(free),
        "free_steps": len(free),
        "seconds": seconds,
        "stepping": sum(timing.total for timing in later),
        "stepped": sum(len(step.tokens) for step in steps if id(step.timing) not in first),
        "profile": {part: sum(getattr(timing, part) for timing in later) for part in PARTS},
        "accepted_per_position": [
            sum(output.accepted_per_position[i] for output in outputs if len(output.accepted_per_position) > i)
            for i in range(deepest)
        ],
        "drafted_per_position": [sum(step.num_draft_tokens > i for step in steps) for i in range(drafted)],
        "digest": hashlib.sha256(json.dumps([output.tokens for output in outputs]).encode()).hexdigest()[:16],
    }


def _free(output: Output, before: int) -> list[int]:
    """Tokens of each step that began before the output had as many tokens."""
    counts, emitted = [], 0
    for step in output.steps:
        if emitted < before:
            counts.append(len(step.tokens))
        emitted += len(step.tokens)
    return counts
