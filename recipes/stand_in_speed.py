"""Speedup over plain decoding where a target forward is worth saving: the stand-in, with every kind of drafter.

`python -m recipes.stand_in_speed --out DIR` builds the stand-in of `recipes.stand_in` in memory and lets all ways to
decode take turns on the same prompts, in a shuffled order, alone and in batches, at temperature 0 and 1. Outputs run
past end tokens, so that all are equally long. The acceptance is that of the embedded pair; the costs are synthetic.

A prompt's (a batch's) seconds are the median over the rounds, a way's tokens per second the sum of tokens over the sum
of these, its speedup the quotient with the fastest way that drafts nothing. `--target DIR` measures another model.
"""

import hashlib
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO

import torch
import typer
from rich.progress import Progress
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import outrider
from outrider import InputError, Sampling
from outrider.bench.costs import Costs, measure_costs
from outrider.lm.open import DTYPES, open_model, open_tokenizer
from outrider.lm.packed import worth_packing
from outrider.load import EMBEDDED_DRAFT, EMBEDDED_TARGET
from outrider.proof.gate import gate
from recipes.evidence import Estimate
from recipes.report import Curve, Findings, Panel, record, table
from recipes.speed import Question, Row, choose, compare, rate, read_prompts
from recipes.stand_in import PARAMETERS, num_parameters, stand_in
from recipes.trial import PROMPTS, Draft, NumPrompts, Out, Prompts, Setting, Threads, Tokens

LENGTHS = tuple(range(2, 9))
TRANSFORMERS = "transformers"


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to decode.

    Attributes:
        drafter: `model` is the draft model; others as the catalog writes them.
        depth: Where it stands in the plot.
    """

    name: str
    drafter: str = "model"
    tree: str = "chain"
    length: str = "fixed:5"
    depth: int = 5
    pad_to: int | None = None

    @property
    def plain(self) -> bool:
        return self.drafter == "none"


PLAIN = (
    Way(name="plain pad_to=1", drafter="none", pad_to=1),
    Way(name="plain pad_to=2", drafter="none", pad_to=2),
    Way(name=TRANSFORMERS, drafter="none"),
)
OTHERS = (
    Way(name="suffix", drafter="suffix"),
    Way(name="ngram", drafter="ngram"),
    Way(name="gumbel 2x1x1x1", tree="gumbel:branching=2x1x1x1", length="fixed:4", depth=4),
    Way(name="gumbel 2x2x1", tree="gumbel:branching=2x2x1", length="fixed:3", depth=3),
    Way(name="dynamic, 10 nodes", tree="dynamic:width=3,num_nodes=10", length="fixed:5"),
)


def ways(costs: Costs, lengths: Sequence[int] = LENGTHS, others: Sequence[Way] = OTHERS) -> list[Way]:
    """All ways that are compared; the planned length is told the costs."""
    chains = [Way(name=f"chain of {n}", length=f"fixed:{n}", depth=n) for n in lengths]
    told = f"planned:draft_cost={costs.draft:.4f},token_cost={costs.token:.4f}"
    return [*PLAIN, *chains, Way(name="planned chain", length=told, depth=max(lengths) + 1), *others]


Go = Callable[[Sequence[Question], float, int], Row]
"""Runs prompts together at a temperature, with a seed."""


class Pair:
    """A target and a draft model, loaded once, in as many engines as there are ways."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, setting: Setting, max_slots: int
    ) -> None:
        # Ends are ignored; transformers has no option for that.
        model.generation_config.eos_token_id = None
        self.model, self.tokenizer, self.setting, self.max_slots = model, tokenizer, setting, max_slots
        self.first = self.load(drafter=f"model:path={setting.draft}")

    def load(self, **parts: Any) -> outrider.Engine:
        """An engine over the model, packed as one that is loaded by its path."""
        own = {"tokenizer": self.tokenizer, "max_slots": self.max_slots, "prepack": worth_packing(self.model)}
        return outrider.load(self.model, **own, **parts)

    def go(self, way: Way) -> Go:
        """How a way runs, each time from a cold cache."""
        if way.name == TRANSFORMERS:
            return self._transformers
        drafter = self.first.parts.drafter if way.drafter == "model" else way.drafter
        engine = self.load(drafter=drafter, tree=way.tree, length=way.length, pad_to=way.pad_to)

        def go(questions: Sequence[Question], temperature: float, seed: int) -> Row:
            samplings = [Sampling(temperature=temperature, seed=1000 * seed + i) for i in range(len(questions))]
            prompts = [list(question.tokens) for question in questions]
            began = time.perf_counter()
            outputs = engine.generate(
                prompts, max_new_tokens=self.setting.max_new_tokens, sampling=samplings, ignore_eos=True
            )
            seconds = time.perf_counter() - began
            engine.rest()
            return {
                **_row([output.tokens for output in outputs], seconds),
                "steps": sum(output.num_steps for output in outputs),
                "drafted": sum(output.num_draft_tokens for output in outputs),
                "accepted": sum(output.num_accepted_tokens for output in outputs),
            }

        return go

    @torch.inference_mode()
    def _transformers(self, questions: Sequence[Question], temperature: float, seed: int) -> Row:
        """transformers' own loop over a padded batch."""
        longest = max(len(question.tokens) for question in questions)
        pad = self.model.generation_config.pad_token_id or 0
        missing = [longest - len(question.tokens) for question in questions]
        ids = torch.tensor([[pad] * n + list(q.tokens) for n, q in zip(missing, questions, strict=True)])
        mask = torch.tensor([[0] * n + [1] * (longest - n) for n in missing])
        law: dict[str, Any] = {"do_sample": False}
        if temperature:
            law = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        torch.manual_seed(seed)
        began = time.perf_counter()
        said = self.model.generate(
            ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            max_new_tokens=self.setting.max_new_tokens,
            pad_token_id=pad,
            **law,
        )
        seconds = time.perf_counter() - began
        tokens = said[:, longest:].tolist()
        return {**_row(tokens, seconds), "steps": sum(map(len, tokens)), "drafted": 0, "accepted": 0}


def _row(tokens: Sequence[Sequence[int]], seconds: float) -> Row:
    digest = hashlib.sha256(json.dumps([list(each) for each in tokens]).encode()).hexdigest()[:16]
    return {"tokens": sum(map(len, tokens)), "seconds": seconds, "digest": digest}


def findings(rows: Sequence[Row], given: Sequence[Way], rounds: int) -> Findings:
    """A table and a panel for every batch size and temperature."""
    tables, panels = [], []
    for batch, temperature in sorted({(row["batch"], row["temperature"]) for row in rows}):
        own = [row for row in rows if (row["batch"], row["temperature"]) == (batch, temperature)]
        by_way = {way.name: [row for row in own if row["way"] == way.name] for way in given}
        plain = max((way.name for way in given if way.plain), key=lambda name: rate(by_way[name]))
        prompts = sorted({row["prompt"] for row in own})
        reference = {row["prompt"]: row["digest"] for row in by_way["plain pad_to=2"]}
        lines, speedups = [], {}
        for way in given:
            mine = by_way[way.name]
            found = compare(mine, by_way[plain], prompts)
            speedups[way.name] = Estimate(value=found["speedup"], low=found["low"], high=found["high"])
            rates = [
                rate([row for row in mine if row["round"] == r])
                / rate([row for row in by_way[plain] if row["round"] == r])
                for r in range(rounds)
            ]
            steps, drafted = (sum(row[name] for row in mine) for name in ("steps", "drafted"))
            same = sum(row["digest"] == reference[row["prompt"]] for row in mine) / len(mine)
            lines.append(
                [
                    way.name,
                    f"{rate(mine):.1f}",
                    speedups[way.name].text(),
                    f"{min(rates):.2f} to {max(rates):.2f}",
                    f"{sum(row['tokens'] for row in mine) / steps:.2f}",
                    f"{sum(row['accepted'] for row in mine) / drafted:.0%}" if drafted else "-",
                    "-" if temperature else f"{same:.0%}",
                ]
            )
        head = ("way", "tokens/s", "speedup", "by round", "block efficiency", "acceptance", "same as plain pad_to=2")
        title = f"Batch of {batch}, temperature {temperature:g}"
        tables.append(f"## {title}\n\nPlain is `{plain}`.\n\n{table(head, lines)}")
        chains = [way for way in given if way.name.startswith("chain of")]
        curves = [Curve(label="chain", x=[way.depth for way in chains], y=[speedups[way.name] for way in chains])] + [
            Curve(label=way.name, x=[way.depth], y=[speedups[way.name]])
            for way in given
            if way not in chains and not way.plain
        ]
        panels.append(Panel(title=title, x="draft length (depth of trees)", y=f"speedup over {plain}", curves=curves))
    return Findings(tables=tables, panels=panels, claims=[])


def run(
    setting: Setting,
    *,
    rounds: int = 3,
    batch_sizes: Sequence[int] = (1, 8),
    temperatures: Sequence[float] = (0.0, 1.0),
    parameters: int = PARAMETERS,
    dtype: str = "bfloat16",
    lengths: Sequence[int] = LENGTHS,
    others: Sequence[Way] = OTHERS,
    costs: Costs | None = None,
) -> str:
    """Measure and write everything to the setting's folder; returns the tables. Costs are measured unless given."""
    if dtype not in DTYPES:
        raise InputError(f"unknown dtype {dtype!r}; available: {', '.join(DTYPES)}")
    if min(batch_sizes) < 1 or max(batch_sizes) > setting.num_prompts:
        raise InputError(f"batch sizes must be in 1..{setting.num_prompts}, the number of prompts, got {batch_sizes}")
    torch.set_num_threads(setting.threads)

    def work(file: TextIO, progress: Progress) -> Findings:
        if setting.target is None:
            model, place = stand_in(parameters).to(DTYPES[dtype]), str(EMBEDDED_TARGET)
        else:
            model, place = open_model(setting.target, dtype=dtype), setting.target
        tokenizer = open_tokenizer(place)
        if tokenizer is None:
            raise InputError(f"there is no tokenizer beside {place}; put its files there")
        pair = Pair(model, tokenizer, setting, max(batch_sizes))
        gate(pair.first)
        chosen = _questions(pair, setting)
        known = costs or measure_costs(pair.first, chosen[0].tokens, rounds=rounds)
        given = ways(known, lengths, others)
        runs = {way.name: pair.go(way) for way in given}
        for batch in batch_sizes:
            for way in given:
                runs[way.name](chosen[:batch], 0.0, 0)
        jobs = [
            (batch, temperature, chosen[first : first + batch])
            for batch in batch_sizes
            for temperature in temperatures
            for first in range(0, len(chosen) - batch + 1, batch)
        ]
        task = progress.add_task("measured", total=rounds * len(jobs) * len(given))
        rows: list[Row] = []
        shuffle = random.Random(0).sample
        for round_ in range(rounds):
            for batch, temperature, questions in shuffle(jobs, len(jobs)):
                for way in shuffle(given, len(given)):
                    made = runs[way.name](questions, temperature, round_)
                    job = {"order": len(rows), "round": round_, "way": way.name, "batch": batch}
                    job |= {"temperature": temperature, "prompt": "+".join(q.id for q in questions)}
                    rows.append({**job, **made})
                    file.write(json.dumps(rows[-1]) + "\n")
                    file.flush()
                    progress.advance(task)
        found = findings(rows, given, rounds)
        return Findings(tables=[about(setting, model, known, dtype), *found.tables], panels=found.panels, claims=[])

    record(setting, "stand_in_speed", work, rounds=rounds, dtype=dtype, parameters=parameters)
    return (setting.out / "table.md").read_text(encoding="utf-8")


def _questions(pair: Pair, setting: Setting) -> list[Question]:
    longest = pair.first.parts.target.max_context - setting.max_new_tokens
    read = [
        Question(id=id, category=category, tokens=tuple(pair.first.encode(prompt)))
        for id, category, prompt in read_prompts(setting.prompts)
    ]
    chosen = choose([q for q in read if 0 < len(q.tokens) <= longest], setting.num_prompts)
    if len(chosen) < setting.num_prompts:
        raise InputError(f"{setting.prompts} has {len(chosen)} prompts that fit, {setting.num_prompts} are needed")
    return chosen


def about(setting: Setting, model: PreTrainedModel, costs: Costs, dtype: str) -> str:
    """What was measured, and what is synthetic about it."""
    kind = (
        "**The costs are synthetic**: the target is the embedded one with neurons added whose outputs count nothing. "
        "The acceptance is that of the embedded pair, and a forward costs what the added weights cost. "
        if setting.target is None
        else ""
    )
    return (
        f"{kind}{num_parameters(model):,} parameters, {dtype}. Outputs run past end tokens. One drafter call costs "
        f"{costs.draft:.3f} target forwards of one token, one more verified token {costs.token:.4f} (medians, batch of "
        "1). Speedups are quotients of sums of median seconds, with a bootstrap over prompts; `by round` has their "
        "range over the rounds.\n"
    )


def main(
    out: Out,
    target: Annotated[str | None, typer.Option(help="Directory or hub id; by default the stand-in.")] = None,
    draft: Draft = EMBEDDED_DRAFT,
    prompts: Prompts = PROMPTS,
    num_prompts: NumPrompts = 16,
    max_new_tokens: Tokens = 96,
    threads: Threads = 2,
    rounds: Annotated[int, typer.Option(min=1, help="How often every run is repeated.")] = 3,
    batch_sizes: Annotated[str, typer.Option(help="Prompts at once, with commas.")] = "1,8",
    temperatures: Annotated[str, typer.Option(help="With commas.")] = "0,1",
    parameters: Annotated[int, typer.Option(help="Of the stand-in.")] = PARAMETERS,
    dtype: Annotated[str, typer.Option(help="What both models compute in.")] = "bfloat16",
) -> None:
    """Measure speedups over plain decoding with the stand-in as the target."""
    try:
        sizes = sorted({int(size) for size in batch_sizes.split(",")})
        heats = sorted({float(heat) for heat in temperatures.split(",")})
    except ValueError as error:
        raise typer.BadParameter(f"--batch-sizes and --temperatures must be numbers with commas: {error}") from error
    setting = Setting(
        out=Path(out),
        target=target,
        draft=draft,
        prompts=prompts,
        num_prompts=num_prompts,
        max_new_tokens=max_new_tokens,
        threads=threads,
    )
    try:
        typer.echo(
            run(
                setting,
                rounds=rounds,
                batch_sizes=sizes,
                temperatures=heats,
                parameters=parameters,
                dtype=dtype,
            )
        )
    except InputError as error:
        raise typer.BadParameter(str(error)) from error


if __name__ == "__main__":
    typer.run(main)
