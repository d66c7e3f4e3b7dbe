"""Decoding with the trained heads of the recipe `heads`: chains and trees beside plain decoding, in turns."""

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import outrider
from outrider.bench.evidence import IntervalEstimate, Row, Sums
from outrider.bench.folder import Folder
from outrider.bench.speedup import rate, speedup
from outrider.bench.turns import Turn, turns
from outrider.lm.forwards.packed import uncompiled
from outrider.lm.hf.open import DTYPES, open_model, open_tokenizer
from recipes.head_plan import CHAIN, Head, Plan
from recipes.runs import Conditions, PromptBatch, as_row, on_engine
from recipes.stand_in import stand_in
from recipes.trained import DEPTH, TEMPERATURES

PLAIN = "plain"
KEPT = ("prompt", "category", "tokens", "steps", "seconds", "drafted", "accepted", "digest")
"""What is kept of a run's row."""
OF_STEPS = ("free_tokens", "free_steps", "later_steps")


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


def at(rows: Sequence[Row], draft: str, temperature: int) -> list[Row]:
    """The runs of a draft at a temperature."""
    return [row for row in rows if (row["draft"], row["temperature"]) == (draft, temperature)]


def drafts_of(rows: Sequence[Row]) -> list[str]:
    """What the runs of a head drafted, plain decoding left out; the chain first."""
    return sorted({row["draft"] for row in rows} - {PLAIN}, key=lambda name: (name != CHAIN, name))


def folded(rows: Sequence[Row]) -> list[Row]:
    """One row for each prompt and seed of a draft at a temperature: sums of counts, and seconds by the median round."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        found.setdefault((row["draft"], row["temperature"], row["prompt"], row["seed"]), []).append(row)
    made = []
    for own in found.values():
        tokens = sum(row["tokens"] for row in own)
        seconds = tokens * statistics.median(row["seconds"] / row["tokens"] for row in own)
        sums = {name: sum(row[name] for row in own) for name in OF_STEPS}
        made.append({**own[0], **sums, "tokens": tokens, "seconds": seconds})
    return made


def common(rows: Sequence[Row], methods: Collection[str]) -> list[Row]:
    """The rows of some methods, on the seeds and the prompts that all of them have; none where one has no rows.

    Example:
        >>> rows = [{"method": m, "seed": s, "prompt": "x"} for m, s in (("a", 0), ("a", 1), ("b", 0))]
        >>> [(row["method"], row["seed"]) for row in common(rows, ("a", "b"))]
        [('a', 0), ('b', 0)]
    """
    units = {method: {(r["prompt"], r["seed"]) for r in rows if r["method"] == method} for method in methods}
    seeds = set.intersection(*({seed for _, seed in own} for own in units.values()))
    have = [{prompt for prompt, _ in own if {(prompt, seed) for seed in seeds} <= own} for own in units.values()]
    prompts = set.intersection(*have) if seeds else set()
    return [r for r in rows if r["method"] in units and r["prompt"] in prompts and r["seed"] in seeds]


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """What the runs of one draft say, at one temperature.

    Attributes:
        efficiency: Tokens per step, over the steps that have room for a whole draft; its interval is over prompts and
            seeds.
        speedup: Over plain decoding, with an interval over prompts.
        draft_cost: Seconds of drafting in a step, over those of the target's forward in a plain step.
        rate: Tokens per second.
    """

    efficiency: IntervalEstimate
    speedup: IntervalEstimate
    draft_cost: float
    rate: float


def told(rows: Sequence[Row], draft: str, temperature: int) -> Decoded | None:
    """The figures of a draft; None if it has no runs."""
    some = [{**row, "method": row["draft"]} for row in rows if row["temperature"] == temperature]
    both = common(some, (draft, PLAIN))
    ours, plain = ([row for row in both if row["draft"] == name] for name in (draft, PLAIN))
    faster = speedup(ours, plain, sorted({row["prompt"] for row in both}))
    if faster is None:
        return None
    return Decoded(
        efficiency=IntervalEstimate.of(Sums(folded(ours), crossed=True).efficiency(draft)),
        speedup=faster,
        draft_cost=per_step(ours, "drafter_seconds") / per_step(plain, "target_seconds"),
        rate=rate(ours),
    )


def per_step(rows: Sequence[Row], name: str) -> float:
    """Seconds of a part in a step: the median over runs."""
    each = [row[name] / row["later_steps"] for row in rows if row["later_steps"]]
    return float(np.median(each)) if each else float("nan")


def best_other(rows: Sequence[Row], temperature: int) -> str | None:
    """The draft beside the chain with the most tokens per second; None if there is none."""
    some = [row for row in rows if row["temperature"] == temperature]
    rates = {draft: rate(at(some, draft, temperature)) for draft in drafts_of(some) if draft != CHAIN}
    return max(rates, key=rates.__getitem__) if rates else None
