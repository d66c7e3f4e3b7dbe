"""Speedup over plain decoding with an expensive target, the stand-in, and every kind of drafter.

`python -m recipes stand_in_speed --out DIR` builds the stand-in of `recipes.stand_in` in memory and lets all ways to
decode take turns on the same prompts, alone and in batches, at temperature 0 and 1. Outputs continue after end tokens,
so that all have the same length. The acceptance is that of the embedded pair; the costs are synthetic.

The seconds of a prompt or batch are the median over the rounds. A way's tokens per second are the sum of tokens over
the sum of these seconds. Its speedup is relative to the fastest way that drafts nothing. `--target DIR` measures
another model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import outrider
from outrider.bench.costs import Costs, measure_costs
from outrider.bench.evidence import Row
from outrider.bench.folder import Folder, folder
from outrider.bench.plot import Curve, Panel
from outrider.bench.report import Findings, Table
from outrider.bench.speedup import rate, speedup
from outrider.bench.turns import Turn, turns
from outrider.bench.workloads.workload import PROMPTS
from outrider.core.types import InputError
from outrider.embedded import EMBEDDED_DRAFT, EMBEDDED_TARGET
from outrider.lm.forwards.forward import Forward
from outrider.lm.forwards.packed import uncompiled
from outrider.lm.hf.open import DTYPES, open_model, open_tokenizer
from outrider.proof.gate import gate
from recipes import options
from recipes.inquiry.trial import Setting
from recipes.questions import Question, questions
from recipes.runs import Conditions, PromptBatch, RunResult, as_row, on_engine, on_transformers
from recipes.stand_in import PARAMETERS, num_parameters, stand_in

LENGTHS = tuple(range(2, 9))
TRANSFORMERS = "transformers"
REFERENCE = "plain pad_to=2"
"""The way with whose outputs all others are compared."""
QUICK = {
    "num_prompts": 2,
    "max_new_tokens": 8,
    "rounds": 1,
    "batch_sizes": "1,2",
    "temperatures": "0",
    "parameters": 20_000_000,
}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A way to decode, at any temperature.

    Attributes:
        drafter: `model` for the draft model, or a drafter as the catalog writes it.
        depth: Its place in the plot.
    """

    name: str
    drafter: str = "model"
    tree: str = "chain"
    length: str = "fixed:5"
    depth: int = 5
    pad_to: int | None = None

    @property
    def plain(self) -> bool:
        """Whether it drafts nothing."""
        return self.drafter == "none"


PLAIN = (
    Kind(name="plain pad_to=1", drafter="none", pad_to=1),
    Kind(name=REFERENCE, drafter="none", pad_to=2),
    Kind(name=TRANSFORMERS, drafter="none"),
)
OTHER_KINDS = (
    Kind(name="suffix", drafter="suffix"),
    Kind(name="ngram", drafter="ngram"),
    Kind(name="gumbel 2x1x1x1", tree="gumbel:branching=2x1x1x1", length="fixed:4", depth=4),
    Kind(name="gumbel 2x2x1", tree="gumbel:branching=2x2x1", length="fixed:3", depth=3),
    Kind(name="dynamic, 10 nodes", tree="dynamic:width=3,num_nodes=10", length="fixed:5"),
)


def kinds(costs: Costs, lengths: Sequence[int] = LENGTHS, others: Sequence[Kind] = OTHER_KINDS) -> list[Kind]:
    """All kinds that are compared; the planned length gets the costs."""
    chains = [Kind(name=f"chain of {n}", length=f"fixed:{n}", depth=n) for n in lengths]
    told = f"planned:draft_cost={costs.draft:.4f},token_cost={costs.token:.4f}"
    return [*PLAIN, *chains, Kind(name="planned chain", length=told, depth=max(lengths) + 1), *others]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A way to decode at a temperature, and how it runs a job."""

    name: str
    temperature: float
    run: Callable[[PromptBatch], RunResult]


class Pair:
    """A target and a draft model, loaded once for the engines of all kinds."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, setting: Setting, max_slots: int
    ) -> None:
        self.model, self.tokenizer, self.setting, self.max_slots = model, tokenizer, setting, max_slots
        self.first = self.load(drafter=f"model:path={setting.draft}")

    @property
    def forward(self) -> Forward:
        """How the target's forwards run."""
        return uncompiled(self.model)

    def load(self, **parts: Any) -> outrider.Engine:
        """An engine over the model, packed as one that is loaded by its path."""
        own = {"tokenizer": self.tokenizer, "max_slots": self.max_slots, "forward": self.forward}
        return outrider.load(self.model, **own, **parts)

    def conditions(self, temperature: float) -> Conditions:
        """The conditions of all ways: end tokens are ignored."""
        return Conditions(max_new_tokens=self.setting.max_new_tokens, temperature=temperature, ignore_eos=True)

    def ways(self, kind: Kind, temperatures: Sequence[float]) -> list[Contender]:
        """A kind at some temperatures, always with a cold cache."""
        if kind.name == TRANSFORMERS:
            return [self._transformers(t) for t in temperatures]
        drafter = self.first.parts.drafter if kind.drafter == "model" else kind.drafter
        engine = self.load(drafter=drafter, tree=kind.tree, length=kind.length, pad_to=kind.pad_to)
        return [self._engine(kind.name, engine, t) for t in temperatures]

    def _engine(self, name: str, engine: outrider.Engine, t: float) -> Contender:
        conditions = self.conditions(t)
        return Contender(name=f"{name} T={t:g}", temperature=t, run=lambda job: on_engine(engine, job, conditions))

    def _transformers(self, t: float) -> Contender:
        conditions = self.conditions(t)
        return Contender(
            name=f"{TRANSFORMERS} T={t:g}",
            temperature=t,
            run=lambda job: on_transformers(self.model, job, conditions),
        )

    def questions(self) -> list[Question]:
        """Prompts that leave room for the output."""
        longest = self.first.parts.target.max_context - self.setting.max_new_tokens
        encode = self.first.encode
        return questions(self.setting.prompts, self.setting.num_prompts, encode=encode, longest=longest)


def findings(rows: Sequence[Row], given: Sequence[Kind]) -> Findings:
    """A table and a panel for every batch size and temperature."""
    tables, panels = [], []
    for batch, temperature in sorted({(row["requests"], row["temperature"]) for row in rows}):
        own = [row for row in rows if (row["requests"], row["temperature"]) == (batch, temperature)]
        by_kind = {kind.name: [row for row in own if row["method"] == kind.name] for kind in given}
        plain = max((kind.name for kind in given if kind.plain), key=lambda name: rate(by_kind[name]))
        prompts = sorted({row["prompt"] for row in own})
        found = {kind.name: speedup(by_kind[kind.name], by_kind[plain], prompts) for kind in given}
        speedups = {name: estimate for name, estimate in found.items() if estimate is not None}
        reference = {row["prompt"]: row["digest"] for row in by_kind[REFERENCE]}
        lines = []
        for kind in given:
            mine = by_kind[kind.name]
            rates = _by_round(mine, by_kind[plain])
            steps, drafted = sum(row["steps"] for row in mine), sum(row["drafted"] or 0 for row in mine)
            same = sum(row["digest"] == reference[row["prompt"]] for row in mine) / len(mine)
            lines.append(
                [
                    kind.name,
                    f"{rate(mine):.1f}",
                    speedups[kind.name].text(),
                    f"{min(rates):.2f} to {max(rates):.2f}",
                    f"{sum(row['tokens'] for row in mine) / steps:.2f}",
                    f"{sum(row['accepted'] for row in mine) / drafted:.0%}" if drafted else "-",
                    "-" if temperature else f"{same:.0%}",
                ]
            )
        head = ("way", "tokens/s", "speedup", "by round", "block efficiency", "acceptance", f"same as {REFERENCE}")
        title = f"Batch of {batch}, temperature {temperature:g}"
        tables.append(Table(title=title, text=f"Plain is `{plain}`.", head=head, lines=lines))
        chains = [kind for kind in given if kind.name.startswith("chain of")]
        curves = [Curve(label="chain", x=[kind.depth for kind in chains], y=[speedups[kind.name] for kind in chains])]
        curves += [
            Curve(label=kind.name, x=[kind.depth], y=[speedups[kind.name]])
            for kind in given
            if kind not in chains and not kind.plain
        ]
        panels.append(Panel(title=title, x="draft length (depth of trees)", y=f"speedup over {plain}", curves=curves))
    return Findings(tables=tables, panels=panels)


def _by_round(ours: Sequence[Row], plain: Sequence[Row]) -> list[float]:
    """The speedup of each round."""
    rounds = sorted({row["round"] for row in ours})
    return [rate([r for r in ours if r["round"] == k]) / rate([r for r in plain if r["round"] == k]) for k in rounds]


def run(
    setting: Setting,
    *,
    rounds: int = 3,
    batch_sizes: Sequence[int] = (1, 8),
    temperatures: Sequence[float] = (0.0, 1.0),
    parameters: int = PARAMETERS,
    dtype: str = "bfloat16",
    lengths: Sequence[int] = LENGTHS,
    others: Sequence[Kind] = OTHER_KINDS,
    costs: Costs | None = None,
) -> Findings:
    """Measure and write everything to the setting's folder. Costs are measured if they are not given."""
    if dtype not in DTYPES:
        raise InputError(f"unknown dtype {dtype!r}; available: {', '.join(DTYPES)}")
    if min(batch_sizes) < 1 or max(batch_sizes) > setting.num_prompts:
        raise InputError(f"batch sizes must be in 1..{setting.num_prompts}, the number of prompts, got {batch_sizes}")
    torch.set_num_threads(setting.threads)
    more = {"batch_sizes": list(batch_sizes), "temperatures": list(temperatures), "parameters": parameters}
    with folder(setting.out, "stand_in_speed", {**vars(setting), "rounds": rounds, "dtype": dtype, **more}) as place:
        model, tokenizer = models(setting, parameters, dtype)
        pair = Pair(model, tokenizer, setting, max(batch_sizes))
        gate(pair.first)
        chosen = pair.questions()
        known = costs or measure_costs(pair.first, rounds=rounds)
        given = kinds(known, lengths, others)
        rows = measure(place, pair, given, chosen, batch_sizes, temperatures, rounds)
        found = findings(rows, given)
        made = Findings(tables=found.tables, panels=found.panels, text=about(setting, model, known, dtype))
        place.finish(made)
        return made


def models(setting: Setting, parameters: int, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target, and the tokenizer beside it."""
    place = str(EMBEDDED_TARGET) if setting.target is None else setting.target
    tokenizer = open_tokenizer(place)
    if tokenizer is None:
        raise InputError(f"there is no tokenizer beside {place}; put its files there")
    if setting.target is None:
        return stand_in(parameters).to(DTYPES[dtype]), tokenizer
    return open_model(place, dtype=dtype), tokenizer


def measure(
    place: Folder,
    pair: Pair,
    given: Sequence[Kind],
    chosen: Sequence[Question],
    batch_sizes: Sequence[int],
    temperatures: Sequence[float],
    rounds: int,
) -> list[Row]:
    """All kinds at all temperatures take turns on all batches."""
    ways = [way for kind in given for way in pair.ways(kind, temperatures)]
    jobs = [
        PromptBatch(questions=tuple(chosen[first : first + batch]))
        for batch in batch_sizes
        for first in range(0, len(chosen) - batch + 1, batch)
    ]
    for batch in batch_sizes:
        for way in ways:
            way.run(PromptBatch(questions=tuple(chosen[:batch])))

    def one(turn: Turn[Contender, PromptBatch]) -> Row:
        way, job = turn.way, PromptBatch(questions=turn.job.questions, seed=turn.round)
        return as_row(way.run(job), way.name.rpartition(" T=")[0], job, pair.conditions(way.temperature))

    return place.take("measured", turns(ways, jobs, rounds=rounds), one)


def about(setting: Setting, model: PreTrainedModel, costs: Costs, dtype: str) -> str:
    """What was measured, and which part of it is synthetic."""
    kind = (
        "The costs are synthetic: the target is the embedded one with neurons added whose outputs count nothing. "
        "The acceptance is that of the embedded pair, and a forward costs what the added weights cost. "
        if setting.target is None
        else ""
    )
    return (
        f"{kind}{num_parameters(model):,} parameters, {dtype}. Outputs run past end tokens. One drafter call costs "
        f"{costs.draft:.3f} target forwards of one token, one more verified token {costs.token:.4f} (medians, batch of "
        "1). Speedups are quotients of sums of median seconds, with a bootstrap over prompts; `by round` has their "
        "range over the rounds."
    )


def main(
    out: options.Out = None,
    target: Annotated[str | None, typer.Option(help="Directory or hub id; by default the stand-in.")] = None,
    draft: options.Draft = EMBEDDED_DRAFT,
    prompts: options.Prompts = PROMPTS,
    num_prompts: options.NumPrompts = 16,
    max_new_tokens: options.MaxNewTokens = 96,
    threads: options.Threads = 2,
    rounds: options.Rounds = 3,
    batch_sizes: Annotated[str, typer.Option(help="Prompts at once, with commas.")] = "1,8",
    temperatures: Annotated[str, typer.Option(help="With commas.")] = "0,1",
    parameters: Annotated[int, typer.Option(help="Of the stand-in.")] = PARAMETERS,
    dtype: options.Dtype = "bfloat16",
) -> None:
    """Measure speedups over plain decoding with the stand-in as the target."""
    setting = Setting(
        out=out,
        target=target,
        draft=draft,
        prompts=prompts,
        num_prompts=num_prompts,
        max_new_tokens=max_new_tokens,
        threads=threads,
    )
    run(
        setting,
        rounds=rounds,
        batch_sizes=options.whole_numbers("--batch-sizes", batch_sizes),
        temperatures=options.numbers("--temperatures", temperatures),
        parameters=parameters,
        dtype=dtype,
    )
