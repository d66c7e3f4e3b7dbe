"""Heads that read the target's hidden states, trained alike for the embedded target: what they draft, at what cost.

`python -m recipes heads --data TEXTS --prompts FILE --prompts FILE --work DIR --out DIR` lets the target write texts
and trains every head on them: the same tokens, the same steps, the same divergence. Each head is trained with several
seeds and judged along what the target says to held-out prompts, at temperatures 0 and 1. `--engine` decodes with the
trained heads too: chains and trees, in turns with plain decoding.

What is trained and judged stays in the working folder, one folder for each head. So heads can be trained by several
processes beside each other (`--heads medusa`, `--heads eagle3`), and a run that was cut off goes on. `--as-is` trains
nothing and makes the tables of all that is there.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer
from filelock import FileLock
from rich.progress import Progress

from outrider.bench.circumstances import shown
from outrider.bench.evidence import Row
from outrider.bench.folder import Folder, folder, read_record, read_rows
from outrider.bench.turns import Turn
from outrider.core.types import InputError
from outrider.heads.objective import HeadObjective
from outrider.host.threads import use_threads
from outrider.training.data.shards import Captured
from outrider.training.loop import steps as loop
from outrider.training.loop.steps import train
from recipes import options
from recipes.head_findings import findings
from recipes.head_runs import Decoder, Timing, decode
from recipes.head_texts import Wanted, states
from recipes.head_ways import HEADS, Head, all_taps, chosen_heads
from recipes.trained import DEPTH, TEMPERATURES, Budget, Seed, judged, of

QUICK = {
    "num_texts": 12,
    "steps": 2,
    "num_prompts": 2,
    "length": 48,
    "batch_size": 2,
    "seeds": 1,
    "engine": True,
    "timed_prompts": 1,
    "max_new_tokens": 12,
}
PromptFiles = Annotated[list[Path], typer.Option(help="Held-out prompts; may be given several times.")]
PromptsOfFile = Annotated[int, typer.Option(min=1, help="Held-out prompts of each file.")]
TimedPrompts = Annotated[int, typer.Option(min=1, help="Prompts of each file to decode.")]
Engine = Annotated[bool, typer.Option("--engine", help="Decode with the heads too, in turns; wants quiet.")]
SAVE_EVERY = 50
"""Steps between checkpoints."""
SAID_EVERY = 60.0
"""Seconds between lines about a training that no terminal shows."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is asked for.

    Attributes:
        budget: How heads are trained.
        wanted: Texts to learn from and to judge on.
        timing: How they decode; None does not decode.
        work: Folder of texts, states and heads.
        stand_in: Whether runs are those with the stand-in.
        compiled: Whether runs are those with compiled forwards.
    """

    budget: Budget
    wanted: Wanted
    timing: Timing | None
    work: Path
    threads: int
    stand_in: bool = False
    compiled: bool = False

    @property
    def place(self) -> Path:
        """Folder of all heads of this budget."""
        own = self.budget
        return self.work / f"heads-{own.num_texts}x{own.length}-{own.steps}x{own.batch_size}"

    def trained(self, head: Head) -> Path:
        """Folder of a head, or of the head whose weights it uses."""
        return self.place / (head.weights_of or head.name)

    def runs(self, head: Head) -> Path:
        """Folder of the runs of a head."""
        return self.place / head.name / "-".join(["runs", *(name for name, on in self._kinds if on)])

    @property
    def _kinds(self) -> Sequence[tuple[str, bool]]:
        return [("stand-in", self.stand_in), ("compiled", self.compiled)]

    @property
    def given(self) -> dict[str, object]:
        """What a judged head depends on."""
        names = ("num_texts", "length", "steps", "batch_size", "learning_rate", "num_prompts")
        return {**{name: getattr(self.budget, name) for name in names}, "prompts": _names(self.wanted.prompts)}


class Making:
    """Trains and judges heads, one after the other; what is there already is not made again."""

    def __init__(self, plan: Plan, progress: Progress) -> None:
        self.plan, self.progress = plan, progress

    @cached_property
    def decoder(self) -> Decoder:
        """The target, to decode with."""
        if self.plan.timing is None:
            raise ValueError("nothing is decoded")
        return Decoder(self.plan.timing, self.plan.wanted)

    @cached_property
    def given(self) -> "Given":
        """Texts and states, made by the first process that needs them; another waits for it."""
        work = self.plan.work
        work.mkdir(parents=True, exist_ok=True)
        with FileLock(work / "texts.lock"):
            return Given(self.plan, self.progress)

    def make(self, head: Head) -> None:
        """Train and judge a head with every seed, and decode with it if that is asked for."""
        place, plan = self.plan.trained(head), self.plan
        place.mkdir(parents=True, exist_ok=True)
        with FileLock(place / "head.lock"):
            if head.weights_of is None:
                kept = _kept(place, plan.given, self.progress)
                seeds = [Seed(number=number) for number in range(plan.budget.seeds)]
                kept.take(f"made {head.name}", [Turn(round=0, way=head, job=seed) for seed in seeds], self._made)
            if plan.timing is not None:
                timing = plan.timing
                asked = {"dtype": timing.dtype, "max_new_tokens": timing.max_new_tokens, "threads": plan.threads}
                runs = _kept(plan.runs(head), {**plan.given, **asked}, self.progress)
                folders = {seed: place / f"seed-{seed}" for seed in range(plan.budget.seeds)}
                if missing := [folder for folder in folders.values() if not (folder / "config.json").is_file()]:
                    raise InputError(f"{missing[0]} has no trained head; train {head.weights_of} first")
                decode(runs, head, folders, self.decoder, timing, plan.wanted)

    def _made(self, turn: Turn[Head, Seed]) -> Row:
        """Train and judge a head with one seed."""
        head, seed, given = turn.way, turn.job, self.given
        learner = head.make(given.target, seed.number)
        batches = self.plan.budget.batches(given.texts.answers, given.states_for(learner))(seed.number)
        meter = Meter(f"{head.name}, {seed.name}", self.progress)
        device = "cpu" if self.plan.wanted.device == "cpu" else None
        settings = replace(self.plan.budget.settings(seed.number), save_every=SAVE_EVERY, device=device)
        done = train(learner, batches, settings, self.plan.trained(head) / seed.name, progress=meter)
        learner.eval()
        return {
            "method": head.name,
            "seed": seed.number,
            "steps": done.step,
            "parameters": sum(p.numel() for p in learner.parameters() if p.requires_grad),
            "seconds": meter.seconds(done.step),
            "each": [_kept_fields(row) for row in judged(learner, given.texts)],
        }


class Given:
    """What all heads share: the target, its texts, and its hidden states along them."""

    def __init__(self, plan: Plan, progress: Progress) -> None:
        self.texts = plan.wanted.texts(plan.work / "texts", progress)
        self.target = plan.wanted.model()
        self._states: Captured | None = None
        # Those of a large target need more space than time.
        if plan.wanted.device == "cpu":
            place = plan.work / f"states-{plan.budget.num_texts}x{plan.budget.length}"
            self._states = states(self.target, self.texts.answers, all_taps(self.target), place, progress)

    def states_for(self, learner: HeadObjective) -> Captured | None:
        """The kept states that a learner needs: its taps, and the last one for the target's rows."""
        if self._states is None:
            return None
        return self._states.only({*learner.taps, self._states.manifest.num_layers})


class Meter:
    """Shows how far a training is, and measures its steps."""

    def __init__(self, name: str, progress: Progress) -> None:
        self.name, self.progress = name, progress
        self.task = progress.add_task(name, total=None)
        self._each, self._before, self._said = list[float](), time.process_time(), time.monotonic()

    def __call__(self, now: loop.Progress) -> None:
        """After every step."""
        spent = time.process_time()
        self._each.append(spent - self._before)
        self._before = spent
        self.progress.update(self.task, total=now.steps, completed=now.step)
        if not self.progress.console.is_terminal and time.monotonic() - self._said > SAID_EVERY:
            self._said = time.monotonic()
            left = (now.seconds_left or 0.0) / 60
            self.progress.console.print(f"{self.name}: step {now.step} of {now.steps}, {left:.0f} minutes left")

    def seconds(self, steps: int) -> float | None:
        """Processor seconds of so many steps, by the median of those that were seen; None if none were."""
        return statistics.median(self._each) * steps if self._each else None


def _kept(place: Path, given: Mapping[str, object], progress: Progress) -> Folder:
    """The folder of a head's rows."""
    return Folder(place, "heads", {name: shown(value) for name, value in given.items()}, progress)


def _names(files: Sequence[Path]) -> list[str]:
    return [file.name for file in files]


def _kept_fields(row: Row) -> Row:
    """What is kept of a judged prompt."""
    names = ["prompt", "category"]
    for t in TEMPERATURES:
        names += [f"tokens_{of(t)}", f"steps_{of(t)}", f"places_{t}"]
        names += [f"accepted_{of(t, k)}" for k in range(1, DEPTH + 1)]
    return {name: row[name] for name in names}


def collected(plan: Plan, heads: Sequence[Head]) -> list[Row]:
    """All rows of some heads that are in the working folder, up to the seeds that were asked for."""
    found: list[Row] = []
    for head in heads:
        for name, place in (("made", plan.place / head.name), ("decoded", plan.runs(head))):
            for row in read_rows(place / "rows.jsonl"):
                if row["seed"] >= plan.budget.seeds:
                    continue
                of_head = {"phase": name, "method": head.name, "seed": row["seed"]}
                own = {key: value for key, value in row.items() if key not in ("each", "turn", "order", "round")}
                found.append({**own, **of_head, **({"phase": "trained"} if "each" in row else {})})
                found += [{**of_head, **one} for one in row.get("each", ())]
    return found


def run(plan: Plan, heads: Sequence[Head], place: Folder, as_is: bool = False) -> list[dict[str, Any]]:
    """Train, judge and decode with heads, and write what was found to a folder; returns the claims."""
    making = Making(plan, place.progress)
    for head in () if as_is else heads:
        making.make(head)
    rows = collected(plan, heads)
    if not any(row["phase"] == "made" for row in rows):
        raise InputError(f"{plan.place} has no trained head of these; leave out --as-is")
    place.rows = rows
    place.keep("rows.jsonl", rows)
    found = findings(rows, about(plan, rows), made_with(plan, heads))
    # The claims are on the embedded target.
    return place.finish(replace(found, claims=()) if plan.stand_in else found)


def main(
    data: options.Data,
    work: options.Work,
    prompts: PromptFiles,
    out: options.Out = None,
    heads: Annotated[str, typer.Option(help="Heads by name, with commas; by default all.")] = "",
    num_texts: options.NumTexts = 4000,
    length: options.Length = 128,
    steps: options.Steps = 1000,
    batch_size: options.NumRows = 8,
    learning_rate: options.LearningRate = 1e-3,
    seeds: options.Seeds = 3,
    num_prompts: PromptsOfFile = 60,
    engine: Engine = False,
    stand_in: Annotated[bool, typer.Option("--stand-in", help="Decode with the stand-in of 110M parameters.")] = False,
    compiled: Annotated[bool, typer.Option("--compiled", help="Decode with compiled forwards.")] = False,
    timed_prompts: TimedPrompts = 12,
    max_new_tokens: options.MaxNewTokens = 96,
    rounds: options.Rounds = 1,
    dtype: options.Dtype = "bfloat16",
    threads: options.Threads = 1,
    as_is: Annotated[
        bool, typer.Option("--as-is", help="Train and run nothing more: tables of what is there.")
    ] = False,
) -> None:
    """Train heads, judge them, and compare."""
    use_threads(threads)
    budget = Budget(
        num_texts=num_texts,
        length=length,
        steps=steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        seeds=seeds,
        num_prompts=num_prompts,
    )
    files = tuple(prompts)
    wanted = Wanted(data=data, prompts=files, num_texts=num_texts, length=length, num_prompts=num_prompts)
    timing = Timing(
        num_prompts=timed_prompts,
        max_new_tokens=max_new_tokens,
        rounds=rounds,
        dtype=dtype,
        stand_in=stand_in,
        compiled=compiled,
    )
    plan = Plan(
        budget=budget,
        wanted=wanted,
        timing=timing if engine or stand_in or compiled else None,
        work=work,
        threads=threads,
        stand_in=stand_in,
        compiled=compiled,
    )
    chosen = chosen_heads(heads, HEADS)
    given = {
        **vars(budget),
        "prompts": _names(files),
        "rounds": rounds,
        "stand_in": stand_in,
        "compiled": compiled,
        "out": out,
    }
    with folder(out, "heads", given) as place:
        run(plan, chosen, place, as_is)


def about(plan: Plan, rows: Sequence[Row]) -> str:
    """What was done, in a few sentences."""
    own = plan.budget
    every: dict[str, Any] = {row["prompt"]: None for row in rows if row["phase"] == "made"}
    seeds = {head: len({row["seed"] for row in rows if row["method"] == head}) for head in {r["method"] for r in rows}}
    times = sorted(set(seeds.values()))
    said = f"{times[0]} seed{'s' * (times[0] > 1)}" if len(times) == 1 else f"{times[0]} to {times[-1]} seeds"
    return (
        f"Each head learns {own.steps} steps of {own.batch_size} rows, at most {own.num_tokens:,} tokens, of "
        f"{own.num_texts} texts that the target wrote, with {said}. Held-out prompts: {len(every)}."
    )


def made_with(plan: Plan, heads: Sequence[Head]) -> dict[str, Any]:
    """Commit, date and processor of each head that is there: when it was trained, and when it was decoded with."""
    found: dict[str, Any] = {}
    for head in heads:
        for name, place in (("trained", plan.place / head.name), ("decoded", plan.runs(head))):
            if (place / "circumstances.json").is_file():
                own = read_record(place)["circumstances"]
                kept = {key: own[key] for key in ("commit", "uncommitted_changes", "date", "cpu", "threads")}
                found.setdefault(head.name, {})[name] = kept
    return {"heads": found}
