"""Whether speculation is ever slower than plain decoding of the same engine, by more than two percent.

`python -m recipes never_loses --out DIR` runs the default settings and a fixed length beside `drafter="none"`, with 1
to 8 requests at once, greedily and at temperature 1. In a fixed batch all requests begin together and have one length.
With refilled slots, requests of several lengths come as soon as others end. Outputs go on behind end tokens, so that
all ways emit as many tokens.

All ways take turns on every workload, in rounds. The figure is the median seconds of plain decoding over those of the
way; the spread is that of the same quotient within rounds. Every way runs every workload once before, so that it has
learnt what its steps cost. `python -m recipes never_loses --target DIR` measures another target, with the drafter that
it gets by default.
"""

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import outrider
from outrider.bench.evidence import Estimate, Row
from outrider.bench.folder import folder
from outrider.bench.plot import Curve, Panel
from outrider.bench.report import Findings, Table
from outrider.bench.turns import Turn, turns
from outrider.bench.workload import PROMPTS, Question, read_prompts
from outrider.core.types import InputError, Sampling
from outrider.engine.engine import Engine
from outrider.setup import Setup
from recipes import options

PLAIN, DEFAULT = "plain", "default"
ALLOWED = 0.98
"""The least speed over plain decoding that counts as no loss."""
SHARES = (1.0, 0.5, 0.75, 0.25)
"""Lengths of outputs in refilled slots, as shares of the longest, in turn."""
REFILLS = 4
"""Requests per slot where slots are refilled."""
QUICK = {"requests": "1,2", "max_new_tokens": 8, "rounds": 1}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests of which some run at once.

    Attributes:
        at_once: How many run at once; as soon as one ends the next begins.
        lengths: Tokens of each request's output.
    """

    at_once: int
    temperature: float
    refilled: bool
    questions: tuple[Question, ...]
    lengths: tuple[int, ...]

    @property
    def name(self) -> str:
        """Unique among the workloads."""
        return f"{self.at_once} {self.kind}, temperature {self.temperature:g}"

    @property
    def kind(self) -> str:
        """How requests come."""
        return "refilled" if self.refilled else "fixed"

    @classmethod
    def of(
        cls, at_once: int, temperature: float, refilled: bool, questions: Sequence[Question], longest: int
    ) -> "Workload":
        """As many requests as the kind needs, with questions in turn."""
        count = at_once * (REFILLS if refilled else 1)
        shares = itertools.cycle(SHARES if refilled else (1.0,))
        return cls(
            at_once=at_once,
            temperature=temperature,
            refilled=refilled,
            questions=tuple(itertools.islice(itertools.cycle(questions), count)),
            lengths=tuple(max(1, round(share * longest)) for share in itertools.islice(shares, count)),
        )

    def sampling(self) -> Sampling:
        """Settings of a request. It has no seed: the default lengths of requests with a seed do not follow the load."""
        return Sampling(temperature=self.temperature)


@dataclass(frozen=True, kw_only=True)
class Way:
    """An engine, and what it is called."""

    name: str
    engine: Engine

    @classmethod
    def of(cls, name: str, setup: Setup, slots: int) -> "Way":
        """Plain decoding, the defaults, or the defaults with a length policy of this name."""
        if name == PLAIN:
            setup = replace(setup, drafter="none")
        elif name != DEFAULT:
            setup = replace(setup, length=name)
        return cls(name=name, engine=outrider.load(**{**setup.given(), "max_slots": slots}))

    def run(self, work: Workload) -> Row:
        """Do the work from a cold cache; the row says how long it took."""
        engine, waiting, running = self.engine, list(range(len(work.questions))), 0
        engine.rest()
        tokens = drafted = steps = 0
        began = time.perf_counter()
        while waiting or running:
            while waiting and running < work.at_once:
                request = waiting.pop(0)
                engine.add(
                    list(work.questions[request].tokens),
                    max_new_tokens=work.lengths[request],
                    sampling=work.sampling(),
                    ignore_eos=True,
                )
                running += 1
            for update in engine.step():
                if update.output is not None:
                    if update.output.error is not None:
                        raise update.output.error
                    running -= 1
                    tokens += len(update.output.tokens)
                    drafted, steps = drafted + update.output.num_draft_tokens, steps + update.output.num_steps
        seconds = time.perf_counter() - began
        return {
            "way": self.name,
            "requests": work.at_once,
            "temperature": work.temperature,
            "kind": work.kind,
            "tokens": tokens,
            "drafted": drafted,
            "steps": steps,
            "seconds": seconds,
        }


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each workload and way but plain: its speed over plain decoding, and how it drafted."""
    found = []
    cells = dict.fromkeys((row["temperature"], row["kind"], row["requests"]) for row in rows)
    for cell in sorted(cells):
        own = [row for row in rows if (row["temperature"], row["kind"], row["requests"]) == cell]
        plain = {row["round"]: row["seconds"] for row in own if row["way"] == PLAIN}
        for way in dict.fromkeys(row["way"] for row in own if row["way"] != PLAIN):
            runs = [row for row in own if row["way"] == way]
            ratios = [plain[row["round"]] / row["seconds"] for row in runs]
            over = statistics.median(plain.values()) / statistics.median(row["seconds"] for row in runs)
            found.append(
                {
                    "temperature": cell[0],
                    "kind": cell[1],
                    "requests": cell[2],
                    "way": way,
                    "over_plain": over,
                    "spread": [min(ratios), max(ratios)],
                    "drafted_per_step": sum(row["drafted"] for row in runs) / sum(row["steps"] for row in runs),
                    "tokens_per_step": sum(row["tokens"] for row in runs) / sum(row["steps"] for row in runs),
                    "loses": over < ALLOWED,
                }
            )
    return found


def findings(entries: Sequence[dict[str, Any]]) -> Findings:
    """The summary as a table, and a panel for each temperature and kind."""
    head = ("temperature", "requests", "slots", "way", "speed over plain", "drafted/step", "tokens/step", "")
    lines = [
        [
            f"{e['temperature']:g}",
            e["requests"],
            e["kind"],
            e["way"],
            _over(e).text(".3f"),
            f"{e['drafted_per_step']:.2f}",
            f"{e['tokens_per_step']:.2f}",
            "loses" if e["loses"] else "",
        ]
        for e in entries
    ]
    panels = []
    for temperature, kind in dict.fromkeys((e["temperature"], e["kind"]) for e in entries):
        here = [e for e in entries if (e["temperature"], e["kind"]) == (temperature, kind)]
        curves = [
            Curve(
                label=way,
                x=[e["requests"] for e in here if e["way"] == way],
                y=[_over(e) for e in here if e["way"] == way],
            )
            for way in dict.fromkeys(e["way"] for e in here)
        ]
        title = f"{kind}, temperature {temperature:g}"
        panels.append(Panel(title=title, x="requests at once", y="speed over plain", curves=curves, line=1.0))
    worst = {
        way: min((e for e in entries if e["way"] == way), key=lambda e: e["over_plain"])
        for way in dict.fromkeys(e["way"] for e in entries)
    }
    said = [f"{way} is never below {e['over_plain']:.3f} of plain decoding" for way, e in worst.items()]
    text = f"Quotients of medians over rounds, with the extremes of rounds. In every workload, {' and '.join(said)}."
    return Findings(
        tables=[Table(head=head, lines=lines)], panels=panels, text=text, summary={"entries": list(entries)}
    )


def _over(entry: dict[str, Any]) -> Estimate:
    low, high = entry["spread"]
    return Estimate(value=entry["over_plain"], low=low, high=high)


def run(
    out: Path | None,
    *,
    target: str | None = None,
    ways: str = f"{DEFAULT},fixed:4",
    requests: str = "1,2,3,4,5,6,7,8",
    temperatures: str = "0,1",
    max_new_tokens: int = 96,
    rounds: int = 5,
    threads: int = 2,
) -> list[dict[str, Any]]:
    """Measure and write; returns an entry per workload and way."""
    given = {**locals(), "target": None if target is None else Path(target).name}
    counts, warmths = options.whole_numbers("--requests", requests), options.numbers("--temperatures", temperatures)
    names = [way.strip() for way in ways.split(",") if way.strip()]
    if PLAIN in names or not names:
        raise InputError(f"--ways must be {DEFAULT} or length policies with commas between them, got {ways!r}")
    torch.set_num_threads(threads)
    with folder(out, "never_loses", given) as place:
        setup = Setup() if target is None else Setup(target)
        engines = [Way.of(name, setup, max(counts)) for name in (PLAIN, *names)]
        encode = engines[0].engine.encode
        questions = [Question(id=i, category=c, tokens=tuple(encode(p))) for i, c, p in read_prompts(PROMPTS)]
        work = [
            Workload.of(count, warmth, refilled, questions, max_new_tokens)
            for warmth in warmths
            for refilled in (False, True)
            for count in counts
        ]
        warm = place.progress.add_task("warm-up", total=len(engines) * len(work))
        for way in engines:
            for each in work:
                way.run(each)
                place.progress.advance(warm)

        def measured(turn: Turn[Way, Workload]) -> Row:
            return turn.way.run(turn.job)

        entries = summarise(place.take("measured", turns(engines, work, rounds=rounds), measured))
        place.finish(findings(entries))
        return entries


def main(
    out: options.Out = None,
    target: options.Target = None,
    ways: Annotated[str, typer.Option(help="What is measured beside plain decoding.")] = f"{DEFAULT},fixed:4",
    requests: Annotated[str, typer.Option(help="How many requests run at once.")] = "1,2,3,4,5,6,7,8",
    temperatures: Annotated[str, typer.Option(help="Temperatures.")] = "0,1",
    max_new_tokens: options.MaxNewTokens = 96,
    rounds: options.Rounds = 5,
    threads: options.Threads = 2,
) -> None:
    """Measure speculation beside plain decoding of the same engine."""
    run(
        out,
        target=target,
        ways=ways,
        requests=requests,
        temperatures=temperatures,
        max_new_tokens=max_new_tokens,
        rounds=rounds,
        threads=threads,
    )
