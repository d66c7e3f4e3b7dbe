"""What the tests of published claims share: runs that take turns, intervals, and a folder with everything in it.

A recipe names its ways to decode as data (`Method`), runs all of them on the same prompts with the same seeds in a
shuffled order (`Bench.measure`), and draws its conclusions from `Sums`, in which all methods are resampled together.
The folder that it writes holds `rows.jsonl` (one line per run), `table.md`, `plot.svg`, `claims.json` and
`circumstances.json`.
"""

import hashlib
import io
import json
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, TextIO

import matplotlib
import numpy as np
import torch
import typer
from jaxtyping import Float
from matplotlib.figure import Figure
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import outrider
from outrider import InputError, Sampling
from outrider.drafters.model import ModelPath
from outrider.engine import Output
from outrider.load import EMBEDDED_DRAFT, EMBEDDED_TARGET
from recipes.record import circumstances, write
from recipes.speed import Question, Row, choose, read_prompts

PROMPTS = Path(outrider.__file__).parent / "assets" / "prompts.jsonl"
RESAMPLES = 2000
FEWEST = 8
"""With fewer prompts to resample than this, an interval says too little to judge a claim by."""
PARTS = ("target", "drafter", "rows", "verify", "commit")
COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())

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
        labels: What the rows say of it besides.
    """

    name: str
    tree: str = "chain"
    verifier: str = "block"
    length: str = "fixed:5"
    temperature: float = 1.0
    deepest: int = 8
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
        self._engines: dict[tuple[str, str, str], outrider.Engine] = {}

    def engine(self, method: Method) -> outrider.Engine:
        """The engine of a method."""
        key = (method.tree, method.verifier, method.length)
        if key not in self._engines:
            parts = self.first.parts
            loaded = outrider.load(
                parts.target.model,
                drafter=parts.drafter,
                tree=method.tree,
                verifier=method.verifier,
                length=method.length,
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
        began = perf_counter()
        outputs = engine.generate(
            [list(q.tokens) for q in job.questions],
            max_new_tokens=limit,
            sampling=samplings,
            ignore_eos=self.ignore_eos,
        )
        seconds = perf_counter() - began
        engine.rest()
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
    """What a run gave; counts are summed over its requests, iterations and seconds are the run's."""
    steps = [step for output in outputs for step in output.steps]
    timings = {id(step.timing): step.timing for step in steps}.values()
    free = [count for output in outputs for count in _free(output, max_new_tokens - method.deepest)]
    deepest = max((len(output.accepted_per_position) for output in outputs), default=0)
    drafted = max((step.num_draft_tokens for step in steps), default=0) if method.tree == "chain" else 0
    return {
        "method": method.name,
        "tree": method.tree,
        "verifier": method.verifier,
        "length": method.length,
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
        "profile": {part: sum(getattr(timing, part) for timing in timings) for part in PARTS},
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


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Float[np.ndarray, " samples"]) -> "Estimate":
        """The first sample is the figure, the others are its bootstrap."""
        low, high = np.nanquantile(samples[1:], [0.025, 0.975])
        return cls(value=float(samples[0]), low=float(low), high=float(high))

    def text(self, form: str = ".2f") -> str:
        """As tables have it."""
        return f"{self.value:{form}} [{self.low:{form}}, {self.high:{form}}]"


class Sums:
    """Sums over all runs of each method, as they are and as they would be on resampled prompts and seeds.

    Every resample draws as many prompts as there are and for each as many of its seeds, both with replacement, and is
    the same for all methods: what two methods are compared by is paired. Entry 0 of every array is the plain sum.

    Example:
        >>> rows = [{"method": "a", "prompt": p, "seed": 0, "tokens": 6, "steps": 2} for p in ("x", "y")]
        >>> Estimate.of(Sums(rows).ratio("a", "tokens", "steps"))
        Estimate(value=3.0, low=3.0, high=3.0)
    """

    def __init__(self, rows: Sequence[Row], resamples: int = RESAMPLES) -> None:
        cells: dict[str, dict[tuple[str, int], Row]] = defaultdict(dict)
        for each in rows:
            cells[each["method"]][each["prompt"], each["seed"]] = each
        prompts = sorted({each["prompt"] for each in rows})
        seeds = sorted({each["seed"] for each in rows})
        self.num_prompts = len(prompts)
        self._units = [(prompt, seed) for prompt in prompts for seed in seeds]
        if not rows or any(set(own) != set(self._units) for own in cells.values()):
            raise InputError("every method needs a run of every prompt with every seed; the rows are not complete")
        self.methods, self._cells = list(cells), cells
        self._weights = _weights(len(prompts), len(seeds), resamples)

    def get(self, method: str, name: str) -> Float[np.ndarray, " samples"]:
        """Sum of a field."""
        own = self._cells[method]
        return self._weights @ np.array([own[unit][name] for unit in self._units], dtype=float)

    def ratio(self, method: str, over: str, under: str) -> Float[np.ndarray, " samples"]:
        """Sum of one field over the sum of another."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.get(method, over) / self.get(method, under)

    def efficiency(self, method: str) -> Float[np.ndarray, " samples"]:
        """Block efficiency, over the steps that the request's end does not cut."""
        return self.ratio(method, "free_tokens", "free_steps")

    def speed(self, method: str) -> Float[np.ndarray, " samples"]:
        """Tokens per second, prefill included."""
        return self.ratio(method, "tokens", "seconds")

    def best(
        self, of: Callable[[str], Float[np.ndarray, " samples"]], methods: Sequence[str]
    ) -> Float[np.ndarray, " samples"]:
        """The largest figure of several methods, in each resample anew."""
        return np.max([of(method) for method in methods], axis=0)


def _weights(prompts: int, seeds: int, resamples: int) -> Float[np.ndarray, "samples runs"]:
    """How often each resample has each run, runs in the order of prompts; the first line is the runs as they are."""
    dice = np.random.default_rng(0)
    drawn = dice.integers(0, prompts, (resamples, prompts, 1)) * seeds
    drawn = drawn + dice.integers(0, seeds, (resamples, prompts, seeds))
    flat = drawn.reshape(resamples, -1) + np.arange(resamples)[:, None] * prompts * seeds
    counts = np.bincount(flat.ravel(), minlength=resamples * prompts * seeds).reshape(resamples, -1)
    return np.vstack([np.ones(prompts * seeds), counts])


def gain(ours: Float[np.ndarray, " samples"], theirs: Float[np.ndarray, " samples"]) -> Estimate:
    """By how many percent the first is above the second."""
    return Estimate.of(100 * (ours / theirs - 1))


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A published sentence, and what we found.

    Attributes:
        claim: A sentence that is true or false of a pair; without figures of ours, so that it names the claim.
        paper_value: The paper's figure, in the unit, or its words.
        interval: Our 95 % interval.
        holds: True if the whole interval is on the sentence's side, False if it is on the other, None if neither.
        note: How ours was taken, where that is not plain.
    """

    claim: str
    paper: str
    url: str
    paper_value: float | str | None
    our_value: float
    interval: tuple[float, float]
    unit: str
    holds: bool | None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Paper:
    """Where claims come from."""

    name: str
    url: str

    def claim(
        self,
        claim: str,
        ours: Estimate,
        *,
        over: "Sums",
        published: float | str | None,
        unit: str,
        least: float | None = None,
        most: float | None = None,
        note: str = "",
    ) -> Claim:
        """Judge a sentence that says that a figure, taken from `over`, is above `least` or below `most`."""
        holds: bool | None
        if over.num_prompts < FEWEST:
            holds, note = None, "; ".join(filter(None, (note, f"too few to judge: {over.num_prompts} of {FEWEST}")))
        elif least is not None:
            holds = True if ours.low > least else False if ours.high < least else None
        else:
            holds = None if most is None else True if ours.high < most else False if ours.low > most else None
        return Claim(
            claim=claim,
            paper=self.name,
            url=self.url,
            paper_value=published,
            our_value=ours.value,
            interval=(ours.low, ours.high),
            unit=unit,
            holds=holds,
            note=note,
        )


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Figures over a number; `dashed` for what is not the point."""

    label: str
    x: Sequence[float]
    y: Sequence[Estimate]
    dashed: bool = False


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes. Units stand in the labels."""

    title: str
    x: str
    y: str
    curves: Sequence[Curve]


def draw(panels: Sequence[Panel], columns: int = 2) -> str:
    """Panels side by side as SVG; bars are the 95 % intervals, set a little apart."""
    columns = min(columns, len(panels))
    lines = -(-len(panels) // columns)
    with matplotlib.rc_context({"svg.hashsalt": "outrider", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(7 * columns, 4.6 * lines), layout="constrained")
        for i, panel in enumerate(panels):
            axes = figure.add_subplot(lines, columns, i + 1)
            ticks = sorted({x for curve in panel.curves for x in curve.x})
            apart = min(np.diff(ticks), default=1.0) * 0.35 / max(1, len(panel.curves))
            for k, curve in enumerate(panel.curves):
                value, low, high = (np.array([getattr(e, name) for e in curve.y]) for name in ("value", "low", "high"))
                axes.errorbar(
                    np.array(curve.x) + apart * (k - (len(panel.curves) - 1) / 2),
                    value,
                    # A quantile interval need not hold the figure itself.
                    yerr=[(value - low).clip(min=0), (high - value).clip(min=0)],
                    label=curve.label,
                    color=matplotlib.colormaps["tab20"](k % 20),
                    marker="osD^v<>Px*"[k % 10],
                    linestyle="--" if curve.dashed else "-",
                    markersize=4,
                    linewidth=1.2,
                    elinewidth=0.8,
                    capsize=2,
                )
            axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
            if len(ticks) <= 16:
                axes.set_xticks(ticks)
            axes.grid(alpha=0.3)
            many = len(panel.curves) > 6
            axes.legend(fontsize=7, **({"loc": "upper left", "bbox_to_anchor": (1.01, 1)} if many else {}))
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def table(head: Sequence[str], body: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What a recipe makes of its rows: sections of Markdown, panels, claims."""

    tables: Sequence[str]
    panels: Sequence[Panel]
    claims: Sequence[Claim]


def record(
    setting: Setting, recipe: str, work: Callable[[TextIO, Progress], Findings], **more: object
) -> list[dict[str, Any]]:
    """Do the work, write everything to the setting's folder, and return the claims as `claims.json` has them.

    Args:
        recipe: The recipe's name, for the folder's records.
        work: Measures, writing its rows to the file that it is given.
        more: Arguments beyond the setting's.
    """
    began = circumstances({**vars(setting), "target": setting.target or EMBEDDED_TARGET, **more})
    try:
        setting.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {setting.out}: {error.strerror}; give another with --out") from error
    fresh = setting.out / "rows.jsonl.new"
    try:
        with fresh.open("w", encoding="utf-8") as file, Progress(*COLUMNS) as progress:
            findings = work(file, progress)
    except InputError:
        fresh.unlink()
        with suppress(OSError):
            setting.out.rmdir()
        raise
    fresh.replace(setting.out / "rows.jsonl")
    claims = [asdict(claim) for claim in findings.claims]
    about = (
        f"`python -m recipes.{recipe}`: {began['cpu']}, {setting.threads} threads; torch {began['versions']['torch']}, "
        f"outrider {began['versions']['outrider']} ({began['commit']}"
        f"{', with uncommitted changes' if began['uncommitted_changes'] else ''}); {began['date']}.\n"
        f"Target `{setting.target or 'embedded'}`, draft model `{setting.draft.name}`, prompts: {setting.num_prompts}, "
        f"seeds: {setting.seeds}, tokens: at most {setting.max_new_tokens}. Intervals: 95 %, bootstrap over prompts "
        "and seeds, paired between methods.\n"
    )
    end = {"recipe": recipe, "circumstances": began, "ended": circumstances({})}
    write(setting.out / "circumstances.json", json.dumps(end, indent=2) + "\n")
    write(setting.out / "table.md", "\n".join([about, *findings.tables]))
    write(setting.out / "plot.svg", draw(findings.panels))
    write(setting.out / "claims.json", json.dumps(claims, indent=2) + "\n")
    return claims


def finish(work: Callable[[], list[dict[str, Any]]]) -> None:
    """Run a recipe from the command line: print its claims, or one sentence where the input is wrong."""
    try:
        claims = work()
    except InputError as error:
        raise typer.BadParameter(str(error)) from error
    verdicts = {True: "holds", False: "does not hold", None: "undecided"}
    for claim in claims:
        low, high = claim["interval"]
        ours = f"{claim['our_value']:.3g} [{low:.3g}, {high:.3g}] {claim['unit']}"
        typer.echo(f"{verdicts[claim['holds']]}: {claim['claim']} (ours {ours}, paper {claim['paper_value']})")
