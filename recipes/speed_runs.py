"""The runs of the recipe `speed`: the embedded pair in all ways to decode, its pilot, and bare forwards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import outrider
from outrider.bench.bare import Bare
from outrider.bench.evidence import Row
from outrider.bench.folder import Folder
from outrider.bench.runs import PARTS, Conditions, Job, Run, Way, as_row, on_engine, on_transformers
from outrider.bench.speedup import rate
from outrider.bench.turns import Turn, turns
from outrider.bench.workload import PROMPTS, Question
from outrider.embedded import EMBEDDED_DRAFT, EMBEDDED_TARGET
from outrider.lm.hf.open import open_model, open_tokenizer

PLAIN = ("plain pad_to=1", "plain pad_to=2", "transformers")
SPECULATIVE = "speculative"
TEMPERATURES = (0.0, 1.0)
ASSISTED = (3, 5, 8)
"""Tokens that transformers' assistant drafts."""
NGRAM = 8
BARE_REPEATS = 100


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured.

    Attributes:
        lengths: Fixed draft lengths that the pilot tries.
        pilot_prompts: Further prompts, for the pilot alone.
        seed: Seed of the choice and the order of prompts.
    """

    prompts: Path = PROMPTS
    out: Path | None = None
    num_prompts: int = 48
    max_new_tokens: int = 128
    rounds: int = 3
    threads: int = 2
    draft: Path = EMBEDDED_DRAFT
    lengths: tuple[int, ...] = (3, 4, 5)
    dtype: str = "bfloat16"
    pilot_prompts: int = 8
    seed: int = 0


def repeat_share(tokens: Sequence[int], n: int = NGRAM) -> float:
    """Share of a text's n-grams that occurred in it before; 0 if it has none."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def name_of(way: str, temperature: float) -> str:
    """A method's name: the way at a temperature."""
    return f"{way} T={temperature:g}"


class Pair:
    """The embedded target and a draft model, loaded once, in all ways to decode."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.tokenizer = open_tokenizer(str(EMBEDDED_TARGET))
        self.target, self.draft = (
            open_model(str(place), dtype=plan.dtype, device="cpu") for place in (EMBEDDED_TARGET, plan.draft)
        )
        self.plains = {name: self.load(drafter="none", pad_to=pad) for name, pad in zip(PLAIN[:2], (1, 2), strict=True)}
        self.first = self.plains[PLAIN[0]]
        drafter = f"model:path={plan.draft}"
        self.drafting = {n: self.load(drafter=drafter, length=f"fixed:{n}") for n in plan.lengths}

    def load(self, **parts: Any) -> outrider.Engine:
        """An engine over the target."""
        return outrider.load(self.target, tokenizer=self.tokenizer, **parts)

    def engine_way(self, name: str, engine: outrider.Engine, temperature: float) -> Way:
        """A way to decode with an engine."""
        conditions = self.conditions(temperature)
        return Way(
            name=name_of(name, temperature),
            temperature=temperature,
            run=lambda job: on_engine(engine, job, conditions),
        )

    def transformers_way(self, name: str, temperature: float, **more: Any) -> Way:
        """A way to decode with transformers' own `generate`."""
        conditions, eos_ids = self.conditions(temperature), self.first.eos_ids
        return Way(
            name=name_of(name, temperature),
            temperature=temperature,
            run=lambda job: on_transformers(self.target, job, conditions, eos_ids=eos_ids, **more),
        )

    def conditions(self, temperature: float) -> Conditions:
        """The conditions of all ways."""
        return Conditions(max_new_tokens=self.plan.max_new_tokens, temperature=temperature)

    def ways(self, lengths: Mapping[float, int]) -> list[Way]:
        """All ways that are compared, with the draft length of each temperature."""
        found = []
        for t in TEMPERATURES:
            found += [self.engine_way(name, plain, t) for name, plain in self.plains.items()]
            found.append(self.transformers_way(PLAIN[2], t))
            found.append(self.engine_way(SPECULATIVE, self.drafting[lengths[t]], t))
        for n in ASSISTED:
            own = {"assistant": self.draft, "num_assistant_tokens": n}
            found.append(self.transformers_way(f"transformers assisted {n}", 0.0, **own))
        lookup = self.transformers_way("transformers prompt lookup 5", 0.0, prompt_lookup_num_tokens=5)
        return [*found, lookup]


def measure(place: Folder, phase: str, pair: Pair, ways: Sequence[Way], jobs: Sequence[Job], rounds: int) -> list[Row]:
    """All ways on all prompts in all rounds; each sampled run has its own seed."""
    for way in ways:
        way.run(jobs[0])

    def run(turn: Turn[Way, Job]) -> Row:
        way, job = turn.way, turn.job
        own = Job(questions=job.questions, seed=job.seed + turn.round * len(jobs) if way.temperature else job.seed)
        made = way.run(own)
        found = as_row(made, way.name.rpartition(" T=")[0], own, pair.conditions(way.temperature))
        return {**found, "profile": profile_of(made), "repeat_share": repeat_share(made.tokens[0])}

    return place.take(phase, turns(ways, jobs, rounds=rounds, seed=f"{pair.plan.seed}/{phase}"), run)


def profile_of(run: Run) -> dict[str, float]:
    """The seconds of an engine's run by their purpose; `rest` holds chunks of prompts, admission and text."""
    if not run.outputs:
        return {}
    steps = [step for output in run.outputs for step in output.steps]
    parts = {part: sum(getattr(step.timing, part) for step in steps) for part in PARTS}
    return {**parts, "rest": run.seconds - sum(parts.values())}


def jobs_of(chosen: Sequence[Question]) -> list[Job]:
    """Every prompt by itself, with its own seed."""
    return [Job(questions=(question,), seed=i) for i, question in enumerate(chosen)]


def measure_pilot(place: Folder, pair: Pair, pilot: Sequence[Question]) -> dict[float, dict[int, float]]:
    """Tokens per second of every length at every temperature."""
    ways = {
        (t, n): pair.engine_way(f"length {n}", engine, t) for t in TEMPERATURES for n, engine in pair.drafting.items()
    }
    rows = measure(place, "pilot", pair, list(ways.values()), jobs_of(pilot), 2)
    return {
        t: {n: rate([r for r in rows if (r["temperature"], r["method"]) == (t, f"length {n}")]) for n in pair.drafting}
        for t in TEMPERATURES
    }


def bare_forwards(
    target: PreTrainedModel, draft: PreTrainedModel, context: Sequence[int], gammas: Sequence[int]
) -> dict[str, list[float]]:
    """Seconds of bare forwards behind a context, taking turns: target with 1 and gamma + 1 tokens, draft with 1."""
    ids = torch.tensor([list(context)], device=target.device)
    cases = {"target 1": (target, 1), **{f"target {g + 1}": (target, g + 1) for g in gammas}, "draft 1": (draft, 1)}
    bare = {name: Bare(model, ids) for name, (model, _) in cases.items()}
    found: dict[str, list[float]] = {name: [] for name in cases}
    for i in range(BARE_REPEATS + 5):
        for name, (_, width) in cases.items():
            spent = bare[name].forward(width)
            if i >= 5:
                found[name].append(spent)
    return found
