"""Heads that read the target's hidden states, trained alike for the embedded target: what they draft, at what cost.

`python -m recipes heads --data TEXTS --prompts FILE --prompts FILE --work DIR --out DIR` lets the target write texts
and trains every head on them: the same tokens, the same steps, the same divergence. Each head is trained with several
seeds and judged along what the target says to held-out prompts, at temperatures 0 and 1. `--engine` decodes with the
trained heads too: chains and trees, in turns with plain decoding.

What is trained and judged stays in the working folder, one folder for each head. So heads can be trained by several
processes beside each other (`--heads medusa`, `--heads eagle3`), and a run that was cut off goes on. `--as-is` trains
nothing and makes the tables of all that is there.

`--target org/name --device cuda --heads eagle3 --engine --length 512 --steps 2000` does the same with one head and a
larger target on a GPU, where the target's hidden states are computed in the training steps. This has not been run on a
GPU.
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

import outrider
from outrider.bench.circumstances import shown
from outrider.bench.evidence import Row
from outrider.bench.folder import Folder, read_record, read_rows
from outrider.bench.turns import Turn, turns
from outrider.core.progress import ProgressTask, task
from outrider.core.types import InputError
from outrider.heads.objective import HeadObjective
from outrider.lm.forwards.packed import uncompiled
from outrider.lm.hf.open import DTYPES, open_model, open_tokenizer
from outrider.training.data.capture import capture
from outrider.training.data.shards import Captured, Contents
from outrider.training.loop import steps as loop
from recipes import options, trained
from recipes.head_findings import OF_STEPS, PLAIN, findings
from recipes.head_plan import HEADS, Head, Plan, all_taps, chosen_heads
from recipes.label import Label
from recipes.runs import Conditions, PromptBatch, as_row, on_engine
from recipes.stand_in import stand_in
from recipes.trained import DEPTH, OFTEN, TEMPERATURES, Way, learnt, of, seeds_of

QUICK = trained.QUICK | {
    "num_texts": 12,
    "num_prompts": 2,
    "batch_size": 2,
    "engine": True,
    "timed_prompts": 1,
    "max_new_tokens": 12,
}
SAVE_EVERY = 50
"""Steps between checkpoints."""


KEPT = ("prompt", "category", "tokens", "steps", "seconds", "drafted", "accepted", "digest")
"""What is kept of a run's row."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a head drafts, with one trained seed, at a temperature.

    Attributes:
        draft: `PLAIN` drafts nothing.
    """

    draft: str
    seed: int
    temperature: int

    @property
    def name(self) -> str:
        """Unique among the kinds of a head."""
        return f"{self.draft}, T {self.temperature}, seed {self.seed}"


class Decoder:
    """A target, loaded once for the engines of all heads."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.tokenizer = plan, open_tokenizer(plan.target)
        if plan.stand_in:
            self.model = stand_in() if plan.dtype == "auto" else stand_in().to(DTYPES[plan.dtype])
        else:
            self.model = open_model(plan.target, dtype=plan.dtype, device=plan.device)
        self._forward = "compiled" if plan.compiled else uncompiled(self.model)
        self.plain = self.load(drafter="none", length="fixed:1")

    def load(self, **parts: object) -> outrider.Engine:
        """An engine over the target that has run once."""
        more = {"tokenizer": self.tokenizer, "forward": self._forward, "max_slots": 1}
        engine = outrider.load(self.model, **more, **parts)  # type: ignore[arg-type]
        engine.generate(["Once upon a time"], max_new_tokens=2 * DEPTH)
        engine.rest()
        return engine

    def engines(self, head: Head, place: Path) -> dict[str, outrider.Engine]:
        """The engines of a trained head, by what they draft. They share its weights."""
        drafter: object = head.spec(place)
        found = {PLAIN: self.plain}
        for draft in head.drafts(self.plan.stand_in):
            engine = self.load(drafter=drafter, tree=draft.tree, length=f"fixed:{draft.depth}")
            found[draft.name], drafter = engine, engine.parts.drafter
        return found


def decode(place: Folder, head: Head, folders: Mapping[int, Path], decoder: Decoder) -> None:
    """All drafts of a head take turns with plain decoding, on every prompt and with every trained seed.

    Args:
        folders: The trained heads by their seeds.
    """
    plan = decoder.plan
    drafts = [PLAIN, *(draft.name for draft in head.drafts(plan.stand_in))]
    kinds = [Kind(draft=draft, seed=seed, temperature=t) for seed in folders for t in TEMPERATURES for draft in drafts]
    jobs = [
        PromptBatch(questions=(question,))
        for file in plan.prompts
        for question in plan.questions(decoder.plain, file, plan.timed_prompts)
    ]
    loaded: dict[int, dict[str, outrider.Engine]] = {}

    def one(turn: Turn[Kind, PromptBatch]) -> Row:
        seed = turn.way.seed
        if seed not in loaded:
            loaded[seed] = decoder.engines(head, folders[seed])
        return _run(loaded[seed][turn.way.draft], turn.way, turn.job, plan, turn.round)

    place.take("decoded", turns(kinds, jobs, rounds=plan.rounds), one)


def _run(engine: outrider.Engine, kind: Kind, job: PromptBatch, plan: Plan, round_: int) -> Row:
    """A run, as a row. Its draws are those of the head's seed and the round."""
    conditions = Conditions(max_new_tokens=plan.max_new_tokens, temperature=float(kind.temperature))
    own = PromptBatch(questions=job.questions, seed=1 + kind.seed + 100 * round_)
    row = as_row(on_engine(engine, own, conditions), kind.draft, own, conditions, deepest=DEPTH)
    parts = {f"{part}_seconds": row["profile"][part] for part in ("target", "drafter")}
    kept = {name: row[name] for name in (*KEPT, *OF_STEPS)}
    return {"draft": kind.draft, "seed": kind.seed, "temperature": kind.temperature, **kept, **parts}


class Making:
    """Trains and judges heads, one after the other; what is there already is not made again."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @cached_property
    def decoder(self) -> Decoder:
        """The target, to decode with."""
        return Decoder(self.plan)

    @cached_property
    def shared(self) -> "Shared":
        """Texts and states, made by the first process that needs them; another waits for it."""
        work = self.plan.own_work
        work.mkdir(parents=True, exist_ok=True)
        with FileLock(work / "texts.lock"):
            return Shared(self.plan)

    def make(self, head: Head) -> None:
        """Train and judge a head with every seed, and decode with it if that is asked for."""
        place, plan = self.plan.trained(head), self.plan
        place.mkdir(parents=True, exist_ok=True)
        with FileLock(place / "head.lock"):
            if head.weights_of is None:
                todo = [Turn(round=0, way=head, job=seed) for seed in seeds_of(plan.seeds)]
                self._rows(place, plan.judged_by).take(f"made {head.name}", todo, self._made)
            if plan.decodes:
                asked = {"dtype": plan.dtype, "max_new_tokens": plan.max_new_tokens, "threads": plan.threads}
                folders = {seed: place / f"seed-{seed}" for seed in range(plan.seeds)}
                if missing := [folder for folder in folders.values() if not (folder / "config.json").is_file()]:
                    raise InputError(f"{missing[0]} has no trained head; train {head.weights_of} first")
                decode(self._rows(plan.runs(head), {**plan.judged_by, **asked}), head, folders, self.decoder)

    def _rows(self, place: Path, arguments: Mapping[str, object]) -> Folder:
        """The folder of a head's rows."""
        return Folder(place, "heads", {name: shown(value) for name, value in arguments.items()})

    def _made(self, turn: Turn[Head, Label]) -> Row:
        """Train and judge a head with one seed."""
        head, seed, plan = turn.way, turn.job, self.plan
        learner = head.make(self.shared.target, seed.value)
        device = "cpu" if plan.device == "cpu" else None
        way = Way(
            name=head.name,
            learner=lambda _: learner,
            batches=plan.batches(self.shared.texts.answers, self.shared.states_for(learner)),
            settings=lambda number: replace(plan.settings(number), save_every=SAVE_EVERY, device=device),
        )
        with task(f"{head.name}, {seed.name}", unit="steps") as bar:
            meter = Meter(bar)
            row = learnt(way, seed.value, plan.trained(head) / seed.name, self.shared.texts.judge, meter)
        return row | {
            "parameters": sum(p.numel() for p in learner.parameters() if p.requires_grad),
            "seconds": meter.seconds(row["steps"]),
            "each": [_kept_fields(each) for each in row["each"]],
        }


class Shared:
    """What all heads share: the target, its texts, and its hidden states along them."""

    def __init__(self, plan: Plan) -> None:
        self.texts, self.target = plan.texts(), plan.model()
        self._states: Captured | None = None
        # Those of a large target need more space than time.
        if plan.device == "cpu":
            taps = all_taps(self.target)
            self.texts = self.texts.with_states(self.target, taps)
            place = plan.own_work / f"states-{plan.num_texts}x{plan.length}" / f"taps-{'-'.join(map(str, taps))}"
            place.mkdir(parents=True, exist_ok=True)
            with task("the target's hidden states", len(self.texts.answers), "texts") as bar:
                self._states = capture(
                    self.target, self.texts.answers, Contents(taps=taps), out=place, way=OFTEN, progress=bar.reach
                )

    def states_for(self, learner: HeadObjective) -> Captured | None:
        """The kept states that a learner needs: its taps, and the last one for the target's rows."""
        if self._states is None:
            return None
        return self._states.only({*learner.taps, self._states.manifest.num_layers})


class Meter:
    """Shows how far a training is, and measures its steps."""

    def __init__(self, bar: ProgressTask) -> None:
        self.bar = bar
        self._each, self._before = list[float](), time.process_time()

    def __call__(self, now: loop.Progress) -> None:
        """After every step."""
        spent = time.process_time()
        self._each.append(spent - self._before)
        self._before = spent
        self.bar.reach(now.step, now.steps)

    def seconds(self, steps: int) -> float | None:
        """Processor seconds of so many steps, by the median of those that were seen; None if none were."""
        return statistics.median(self._each) * steps if self._each else None


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
                if row["seed"] >= plan.seeds:
                    continue
                of_head = {"phase": name, "method": head.name, "seed": row["seed"]}
                own = {key: value for key, value in row.items() if key not in ("each", "turn", "order", "round")}
                found.append({**own, **of_head, **({"phase": "trained"} if "each" in row else {})})
                found += [{**of_head, **one} for one in row.get("each", ())]
    return found


def run(plan: Plan, heads: Sequence[Head], place: Folder, as_is: bool = False) -> list[dict[str, Any]]:
    """Train, judge and decode with heads, and write what was found to a folder; returns the claims."""
    making = Making(plan)
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


@options.with_fields(Plan, without=("text_steps", "draft"))
def main(
    plan: Plan,
    heads: Annotated[str, typer.Option(help="Heads by name, with commas; by default all.")] = "",
    as_is: Annotated[
        bool, typer.Option("--as-is", help="Train and run nothing more: tables of what is there.")
    ] = False,
) -> None:
    """Train heads, judge them, and compare."""
    chosen = chosen_heads(heads, HEADS)
    told = {name: getattr(plan, name) for name in ("rounds", "stand_in", "compiled")}
    with plan.folder("heads", prompts=plan.names, **told) as place:
        run(plan, chosen, place, as_is)


def about(plan: Plan, rows: Sequence[Row]) -> str:
    """What was done, in a few sentences."""
    every: dict[str, Any] = {row["prompt"]: None for row in rows if row["phase"] == "made"}
    seeds = {head: len({row["seed"] for row in rows if row["method"] == head}) for head in {r["method"] for r in rows}}
    times = sorted(set(seeds.values()))
    said = f"{times[0]} seed{'s' * (times[0] > 1)}" if len(times) == 1 else f"{times[0]} to {times[-1]} seeds"
    return (
        f"Each head learns {plan.steps} steps of {plan.batch_size} rows, at most {plan.num_tokens:,} tokens, of "
        f"{plan.num_texts} texts that the target wrote, with {said}. Held-out prompts: {len(every)}."
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
