"""The runs of the recipe `peers`: every engine in every mode, each in a process of its own, all at once in memory."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import outrider
from outrider.bench.engines import llama, openvino, transformers, vllm
from outrider.bench.engines import outrider as ours
from outrider.bench.engines.agreement import agreement
from outrider.bench.engines.driver import Asked, Driver, Options
from outrider.bench.engines.engine import Engine, converted, digest
from outrider.bench.engines.environments import CannotMake
from outrider.bench.engines.process import Process, Refused, Stopped
from outrider.bench.evidence import Row
from outrider.bench.folder import Folder
from outrider.bench.runs import Conditions, Job, Run, as_row
from outrider.bench.turns import Turn, turns
from outrider.bench.workload import PROMPTS, Question, questions
from outrider.core import files
from outrider.core.types import InputError
from outrider.embedded import EMBEDDED_DRAFT, EMBEDDED_TARGET
from outrider.lm.hf.open import open_model
from recipes.stand_in import PARAMETERS, build

OURS = "outrider"
ENGINES: Mapping[str, Engine] = {
    OURS: ours.ENGINE,
    "transformers": transformers.ENGINE,
    "vllm": vllm.ENGINE,
    "llama": llama.ENGINE,
    "openvino": openvino.ENGINE,
}
MODELS = ("embedded", "stand-in")
DTYPES = ("bfloat16", "float32")
WARM = 8
"""Tokens of a run before timed ones."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured.

    Attributes:
        engines: Names of the engines that take turns.
        environments: Folder of the engines' environments and of the models that are made for them.
        rounds: How often every run is repeated; 0 compares tokens alone.
        draft_tokens: Most tokens of a draft of the peers. Outrider has its own default.
        ngram: Longest run of tokens that the peers look for in the text before.
    """

    out: Path | None = None
    model: str = "embedded"
    engines: tuple[str, ...] = tuple(ENGINES)
    environments: Path
    prompts: Path = PROMPTS
    num_prompts: int = 16
    max_new_tokens: int = 96
    rounds: int = 3
    batch_sizes: tuple[int, ...] = (1, 8)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    draft_tokens: int = 5
    ngram: int = 3
    dtype: str = "bfloat16"
    threads: int = 2

    def __post_init__(self) -> None:
        for name, value, known in (("model", self.model, MODELS), ("dtype", self.dtype, DTYPES)):
            if value not in known:
                raise InputError(f"unknown {name} {value!r}; available: {', '.join(known)}")
        if max(self.batch_sizes) > self.num_prompts:
            raise InputError(
                f"batch sizes must be in 1..{self.num_prompts}, the number of prompts, got {max(self.batch_sizes)}"
            )

    def conditions(self, temperature: float, new_tokens: int | None = None) -> Conditions:
        """How every engine does its jobs."""
        tokens = new_tokens or self.max_new_tokens
        return Conditions(max_new_tokens=tokens, temperature=temperature, ignore_eos=True)

    def jobs(self, chosen: Sequence[Question]) -> list[Job]:
        """The prompts in batches of every size."""
        return [
            Job(questions=tuple(chosen[first : first + batch]))
            for batch in self.batch_sizes
            for first in range(0, len(chosen) - batch + 1, batch)
        ]


@dataclass(frozen=True, kw_only=True)
class Method:
    """An engine in one of its modes."""

    engine: str
    title: str
    mode: str

    @property
    def name(self) -> str:
        """As tables have it."""
        return f"{self.title}, {self.mode}"


def methods_of(name: str, engine: Engine) -> list[Method]:
    """An engine in all its modes."""
    return [Method(engine=name, title=engine.title, mode=mode) for mode in engine.modes]


@dataclass(frozen=True, kw_only=True)
class Way:
    """A method at a temperature."""

    method: Method
    temperature: float

    @property
    def name(self) -> str:
        """Unique among the ways."""
        return f"{self.method.name}, temperature {self.temperature:g}"


@dataclass(kw_only=True)
class Contest:
    """The drivers that run, and why others do not.

    Attributes:
        left_out: What is left out, and why, in a sentence each.
    """

    plan: Plan
    drivers: dict[Method, Driver] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def ask(self, way: Way, job: Job, new_tokens: int | None = None) -> Run | None:
        """One run; None where the engine does not do it, which is then noted."""
        method, batch = way.method, len(job.questions)
        driver, case = self.drivers.get(method), f"{way.name}, batch {batch}"
        if driver is None or case in self.left_out:
            return None
        wanted = new_tokens or self.plan.max_new_tokens
        asked = Asked(prompts=job.prompts, new_tokens=wanted, temperature=way.temperature, seed=job.seed)
        try:
            answer = driver.ask(asked)
        except Refused as error:
            self.left_out[case] = str(error)
            return None
        except Stopped as error:
            self.left_out[f"{case}, and all runs after it"] = str(error)
            self.drivers.pop(method).stop()
            return None
        counts = {len(tokens) for tokens in answer.tokens}
        if counts != {wanted} or len(answer.tokens) != batch:
            written = ", ".join(map(str, sorted(counts)))
            self.left_out[case] = (
                f"it wrote {written} tokens for {len(answer.tokens)} prompts, not {wanted} for {batch}"
            )
            return None
        return Run(tokens=answer.tokens, seconds=answer.seconds)


@contextmanager
def contest(plan: Plan, place: Folder, context: int, engines: Mapping[str, Engine] = ENGINES) -> Iterator[Contest]:
    """Make what the engines need, and start their drivers; they end with the block.

    Args:
        context: Most tokens of a prompt and its output.
    """
    made = Contest(plan=plan)
    try:
        for name in plan.engines:
            engine = engines[name]
            task = place.progress.add_task(f"{engine.title}: environment, models, drivers", total=len(engine.modes))
            try:
                for method, options, command in _commands(name, engine, plan, context):
                    try:
                        process = Process(command)
                        process.start(options)
                        made.drivers[method] = process
                    except Stopped as error:
                        made.left_out[method.name] = str(error)
                    place.progress.advance(task)
            except CannotMake as error:
                made.left_out[engine.title] = str(error)
        yield made
    finally:
        for each in made.drivers.values():
            each.stop()


def _commands(name: str, engine: Engine, plan: Plan, context: int) -> list[tuple[Method, Options, list[str]]]:
    """What starts the drivers of an engine, one for each mode."""
    folder = plan.environments
    room = engine.environment.made(folder) if engine.environment else None
    target, draft = (str(converted(engine, room, model, folder, plan.dtype)) for model in models(plan))
    found = []
    for method in methods_of(name, engine):
        options = Options(
            mode=method.mode,
            target=target,
            draft=draft,
            dtype=plan.dtype,
            threads=plan.threads,
            draft_tokens=plan.draft_tokens,
            ngram=plan.ngram,
            batch=max(plan.batch_sizes),
            context=context,
        )
        found.append((method, options, engine.command(room)))
    return found


def models(plan: Plan) -> tuple[Path, Path]:
    """Target and draft model; the stand-in is written beside the environments, once."""
    if plan.model == "embedded":
        return EMBEDDED_TARGET, EMBEDDED_DRAFT
    place = plan.environments / "models" / f"{digest(EMBEDDED_TARGET / 'model.safetensors')}-stand-in-{PARAMETERS}"
    if not place.exists():
        with files.replaced(place) as fresh:
            build(fresh)
    return place, EMBEDDED_DRAFT


def prompts(plan: Plan) -> tuple[list[Question], int]:
    """Prompts that leave room for the output, and the most tokens of both."""
    engine = outrider.load(str(EMBEDDED_TARGET), drafter="none")
    context = engine.parts.target.max_context
    longest = context - plan.max_new_tokens
    return questions(plan.prompts, plan.num_prompts, encode=engine.encode, longest=longest), context


def compared(plan: Plan, place: Folder, made: Contest, jobs: Sequence[Job]) -> list[Row]:
    """Every method does every job once at temperature 0; a row has its tokens beside the target's choices.

    The target's choices are those of transformers in float32, whatever the engines compute in.
    """
    target = open_model(str(models(plan)[0]), dtype="float32", device="cpu")
    ways = [Way(method=method, temperature=0.0) for method in made.drivers]

    def one(turn: Turn[Way, Job]) -> Row | None:
        run = made.ask(turn.way, turn.job)
        if run is None:
            return None
        found = [agreement(target, prompt, tokens) for prompt, tokens in zip(turn.job.prompts, run.tokens, strict=True)]
        row = as_row(run, turn.way.method.name, turn.job, plan.conditions(0.0))
        told = {"outputs": [list(tokens) for tokens in run.tokens]}
        return {**row, **told, "first": [each.first for each in found], "gap": [each.gap for each in found]}

    return place.take("compared", turns(ways, jobs), one)


def timed(plan: Plan, place: Folder, made: Contest, jobs: Sequence[Job]) -> list[Row]:
    """All ways take turns on all jobs, each after a short run that is not timed."""
    ways = [Way(method=method, temperature=t) for method in made.drivers for t in plan.temperatures]
    if plan.rounds == 0:
        return []
    firsts = {len(job.questions): job for job in reversed(jobs)}
    task = place.progress.add_task("warm-up", total=len(ways) * len(firsts))
    for way in ways:
        for job in firsts.values():
            made.ask(way, job, min(WARM, plan.max_new_tokens))
            place.progress.advance(task)

    def one(turn: Turn[Way, Job]) -> Row | None:
        job = Job(questions=turn.job.questions, seed=turn.round)
        run = made.ask(turn.way, job)
        if run is None:
            return None
        return as_row(run, turn.way.method.name, job, plan.conditions(turn.way.temperature))

    return place.take("timed", turns(ways, jobs, rounds=plan.rounds), one)
