"""Whether the default settings are ever slower than plain decoding, or much slower than the best fixed length.

`python -m recipes never_loses --out DIR` compares the default settings with plain decoding and with every fixed length
from 1 to 8. A cell is a pair of models, a temperature, whether requests come with seeds, and a number of requests at
once. Each cell is measured in fresh processes: with an empty cache, so that loading measures the costs of steps for one
and a half seconds, and with costs and acceptance that earlier processes kept. In a process all ways answer the same
prompts in some turns, in random order, after each shape of forward has run. Each turn has its own prompts. Outputs go
on behind end tokens, so that all ways emit as many tokens. The default settings get no warm-up of their own: what they
must learn counts.

The figure of a cell is the quotient of the seconds of a round, in the median of rounds: plain decoding, and the best of
all others, over the default. The fastest of nine noisy figures is too fast by luck. So two more columns say what noise
does: plain decoding beside itself, and the default beside the way that was best in the other half of the turns. A third
one has no noise: it adds up what the steps that were made cost by the table. It is what the choices of lengths are
worth, if the table is right.

Cells are measured in parts, such as `--requests 1,2`, into one folder each, or in one run that goes on where it was cut
off. `--target DIR --drafter NAME` measures another pair. It wants a quiet machine, and for models on a CPU `outrider
prepare` before.
"""

import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import outrider
from outrider.bench.evidence import Row
from outrider.bench.folder import folder
from outrider.bench.report import Findings, Table
from outrider.bench.turns import Turn, turns
from outrider.bench.workloads.workload import PROMPTS
from outrider.core.types import Sampling
from outrider.engine.engine import Engine
from outrider.engine.output import Update
from outrider.host import remembered
from outrider.lengths.costs import CostTable
from outrider.lengths.experience import RECORD as ACCEPTANCE
from outrider.lengths.fixed import FixedLength
from outrider.plan.table import RECORD as COSTS
from outrider.plan.table import measured
from recipes import options
from recipes.fresh import row_of
from recipes.label import Label
from recipes.questions import read_prompts

PLAIN, DEFAULT, CONTROL = "plain", "default", "plain, again"
"""`plain, again` runs what `plain` runs. What the two differ by is noise."""
LEARNT = (COSTS, ACCEPTANCE)
"""The kinds of records that a process with an empty cache must not see."""
PASSES = 6
"""How often each way has its turn. A machine is slower now and then, which must not fall on one way alone."""


@contextmanager
def records_in(place: str) -> Iterator[None]:
    """Keep costs and acceptance in another folder. Compiled forwards stay where they are."""
    read, write = remembered.read, remembered.write

    def at_place(function: Any) -> Any:
        def called(kind: str, *arguments: Any) -> Any:
            if kind not in LEARNT:
                return function(kind, *arguments)
            before = os.environ.get("OUTRIDER_CACHE")
            os.environ["OUTRIDER_CACHE"] = place
            try:
                return function(kind, *arguments)
            finally:
                if before is None:
                    del os.environ["OUTRIDER_CACHE"]
                else:
                    os.environ["OUTRIDER_CACHE"] = before

        return called

    remembered.read, remembered.write = at_place(read), at_place(write)
    try:
        yield
    finally:
        remembered.read, remembered.write = read, write


def timed(
    engine: Engine, prompts: Sequence[Sequence[int]], asked: Mapping[str, Any], costs: CostTable | None = None
) -> Row:
    """Answer prompts, as many at once as the job says, from a cold cache. All outputs are equally long.

    Args:
        costs: What steps cost; by it, the row says what the steps that were made cost.
    """
    engine.rest()
    running = asked["requests"]
    tokens = drafted = steps = 0
    by_costs, draws = 0.0, asked["temperature"] > 0
    lengths: dict[str, int] = {}
    began = time.perf_counter()
    for number in range(running):
        prompt = prompts[(number + asked["first"]) % len(prompts)]
        id = engine.add(
            list(prompt),
            max_new_tokens=asked["max_new_tokens"],
            sampling=Sampling(temperature=asked["temperature"], seed=number if asked["seeded"] else None),
            ignore_eos=True,
        )
        lengths[id] = len(prompt)
    while running:
        updates = engine.step()
        if costs is not None:
            by_costs += cost_of(updates, costs, lengths, draws)
        for update in updates:
            lengths[update.id] += len(update.tokens)
            if update.output is not None:
                if update.output.error is not None:
                    raise update.output.error
                running -= 1
                tokens += len(update.output.tokens)
                drafted, steps = drafted + update.output.num_draft_tokens, steps + update.output.num_steps
    return {
        "seconds": time.perf_counter() - began,
        "tokens": tokens,
        "drafted": drafted,
        "steps": steps,
        "by_costs": by_costs,
    }


def cost_of(updates: Sequence[Update], costs: CostTable, lengths: Mapping[str, int], draws: bool) -> float:
    """What the step cost that brought these updates.

    Args:
        lengths: Tokens of each request before it.
        draws: Whether tokens are drawn.
    """
    drafts = {update.id: update.step.num_draft_tokens for update in updates if update.step is not None}
    if not drafts:
        return 0.0
    context = sum(lengths[id] for id in drafts) // len(drafts)
    longest = max(drafts.values())
    steps = costs.steps(len(drafts), sampled=draws, context=context, longest=max(longest, 1))
    return steps[sum(drafted > 0 for drafted in drafts.values())][longest]


def answered(asked: Mapping[str, Any]) -> Row:
    """In a fresh process, all ways: some turns each, in random order. What is compiled or allocated was so before."""
    torch.set_num_threads(asked["threads"])
    options = {name: asked[name] for name in ("target", "drafter") if asked[name] is not None}
    options["max_slots"] = max(8, asked["requests"])
    began = time.perf_counter()
    default = outrider.load(**options)
    loading = time.perf_counter() - began
    costs = default.parts.experience.costs
    if asked["prepare"] and (costs is None or not costs.kept or len({row.length for row in costs.rows}) < 9):
        costs = measured(default.parts, max_slots=default.max_slots, thorough=True)
        return {"kept": costs is not None and costs.kept}
    engines = {PLAIN: default.plain(), CONTROL: default.plain()}
    fixed = outrider.load(**options, length="fixed:1")
    prompts = [default.encode(text) for _, _, text in read_prompts(PROMPTS)]
    for length in asked["lengths"]:
        engines[f"fixed:{length}"] = with_length(fixed, length)
    for engine in (*engines.values(), unlearning(default)):
        timed(engine, prompts, {**asked, "first": 0, "max_new_tokens": 16})
    engines[DEFAULT] = default
    order, made = random.Random(asked["round"]), {way: list[Row]() for way in engines}
    for turn in range(asked["passes"]):
        first = (asked["passes"] * asked["round"] + turn) * asked["requests"]
        for way in order.sample([*engines], len(engines)):
            # Plain decoding uses the slots of the default engine, which keeps some warm.
            default.rest()
            made[way].append(timed(engines[way], prompts, {**asked, "first": first}, costs))
    ways = {
        way: {name: sum(row[name] for row in rows) for name in rows[0]} | {"turns": [row["seconds"] for row in rows]}
        for way, rows in made.items()
    }
    return {
        "loading": loading,
        "kept": costs is not None and costs.kept,
        "busy": costs is not None and costs.busy,
        "ways": ways,
    }


def unlearning(engine: Engine) -> Engine:
    """The same engine, of whose steps the given one learns nothing."""
    parts = replace(engine.parts, experience=engine.parts.experience.copied())
    return Engine(parts, tokenizer=engine.tokenizer, max_slots=engine.max_slots, keep_warm=False)


def with_length(engine: Engine, length: int) -> Engine:
    """The same models with another fixed length."""
    parts = replace(engine.parts, length=FixedLength(num_speculative_tokens=length))
    return Engine(parts, tokenizer=engine.tokenizer, max_slots=engine.max_slots, keep_warm=False)


def answer(text: str) -> None:
    """Do the job that a JSON text describes, and print its row."""
    asked = json.loads(text)
    with tempfile.TemporaryDirectory() as empty:
        place = empty if asked["state"] == "empty" else asked["kept"]
        Path(place).mkdir(parents=True, exist_ok=True)
        with records_in(place):
            print(json.dumps(answered(asked)))


ALLOWED, MEDIAN, LEAST = 0.98, 0.97, 0.93
"""The least speed over plain decoding; the least median, and the least, over the best of all ways."""
STATES = ("empty", "kept")
QUICK = {"requests": "1", "lengths": "2", "states": "empty", "max_new_tokens": 8, "rounds": 1}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What is answered, and how many requests at once."""

    temperature: float
    seeded: bool
    requests: int

    @property
    def name(self) -> str:
        """Unique among the cells."""
        return f"temperature {self.temperature:g}{', seeds' if self.seeded else ''}, {self.requests} at once"


def cells_of(temperatures: Sequence[float], requests: Sequence[int]) -> list[Cell]:
    """All cells; above temperature 0 without seeds and with them."""
    return [
        Cell(temperature=temperature, seeded=seeded, requests=count)
        for temperature in temperatures
        for seeded in ((False, True) if temperature > 0 else (False,))
        for count in requests
    ]


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each cell and state: the default's speed over plain decoding and over the best way, and what that is."""
    found = []
    for cell in sorted({(row["temperature"], row["seeded"], row["requests"], row["state"]) for row in rows}):
        own = [row for row in rows if (row["temperature"], row["seeded"], row["requests"], row["state"]) == cell]
        each = [{way: made["seconds"] for way, made in row["ways"].items()} for row in own]
        best = best_of(each)
        over_plain, ratios = over(each, PLAIN, DEFAULT), over(each, best, DEFAULT)
        steps = sum(row["ways"][DEFAULT]["steps"] for row in own)
        found.append(
            {
                "temperature": cell[0],
                "seeded": cell[1],
                "requests": cell[2],
                "state": cell[3],
                "best": best,
                "over_plain": statistics.median(over_plain),
                "over_best": statistics.median(ratios),
                "over_best_elsewhere": over_best_elsewhere(own),
                "over_best_by_costs": over_best_by_costs(own),
                "plain_beside_itself": statistics.median(over(each, PLAIN, CONTROL)),
                "spread": [min(ratios), max(ratios)],
                "drafted_per_step": sum(row["ways"][DEFAULT]["drafted"] for row in own) / steps,
                "processes_that_drafted": sum(row["ways"][DEFAULT]["drafted"] > 0 for row in own) / len(own),
                "loses": statistics.median(over_plain) < ALLOWED or statistics.median(ratios) < LEAST,
            }
        )
    return found


def over(rounds: Sequence[Mapping[str, float]], way: str, other: str) -> list[float]:
    """How many times what another way takes a way takes, in each round."""
    return [seconds[way] / seconds[other] for seconds in rounds]


def best_of(rounds: Sequence[Mapping[str, float]]) -> str:
    """The way, besides the default, that is faster than plain decoding by most, in the median of rounds."""
    ways = [way for way in rounds[0] if way not in (DEFAULT, CONTROL)]
    return max(ways, key=lambda way: statistics.median(over(rounds, PLAIN, way)))


def over_best_by_costs(rows: Sequence[Row]) -> float | None:
    """The default's speed over the best way's, both by the costs of the steps that they made; None without costs."""
    sums = {way: sum(row["ways"][way]["by_costs"] for row in rows) for way in rows[0]["ways"]}
    return min(sums[way] for way in sums if way not in (DEFAULT, CONTROL)) / sums[DEFAULT] if sums[DEFAULT] else None


def over_best_elsewhere(rows: Sequence[Row]) -> float:
    """The default's speed over that of the way that is best in the other turns: odd turns choose for even ones, and
    even turns for odd ones. So no way is called the best for its luck in the turns that are compared.
    """
    halves = [
        [{way: sum(made["turns"][half::2]) for way, made in row["ways"].items()} for row in rows] for half in (0, 1)
    ]
    ratios = [
        statistics.median(over(seconds, best_of(chosen_in), DEFAULT)) for chosen_in, seconds in (halves, halves[::-1])
    ]
    return math.sqrt(ratios[0] * ratios[1])


def findings(entries: Sequence[dict[str, Any]]) -> Findings:
    """The summary as a table."""
    head = (
        *("temperature", "seeds", "requests", "cache", "best way", "over plain", "over the best"),
        *("over the best of other turns", "over the best by costs", "plain over itself", "drafted/step", ""),
    )
    lines = [
        [
            f"{e['temperature']:g}",
            "yes" if e["seeded"] else "no",
            e["requests"],
            e["state"],
            e["best"],
            f"{e['over_plain']:.3f}",
            f"{e['over_best']:.3f} [{e['spread'][0]:.3f}, {e['spread'][1]:.3f}]",
            f"{e['over_best_elsewhere']:.3f}",
            "" if e["over_best_by_costs"] is None else f"{e['over_best_by_costs']:.3f}",
            f"{e['plain_beside_itself']:.3f}",
            f"{e['drafted_per_step']:.2f}",
            "loses" if e["loses"] else "",
        ]
        for e in entries
    ]
    middle = statistics.median(e["over_best"] for e in entries)
    worst = min(entries, key=lambda e: e["over_best"])
    plain = min(e["over_plain"] for e in entries)
    itself = [e["plain_beside_itself"] for e in entries]
    elsewhere = statistics.median(e["over_best_elsewhere"] for e in entries)
    by_costs = [e["over_best_by_costs"] for e in entries if e["over_best_by_costs"] is not None]
    text = (
        "Quotients in the median of rounds, with the extremes of rounds. The default has "
        f"{middle:.3f} of the best way's speed in the median of cells (goal {MEDIAN}), at least "
        f"{worst['over_best']:.3f} (goal {LEAST}), and at least {plain:.3f} of plain decoding's (goal {ALLOWED}). "
        f"Plain decoding has {min(itself):.3f} to {max(itself):.3f} of its own speed, which is noise. Over the way "
        f"that is best in the other turns, the default has {elsewhere:.3f} in the median of cells."
    )
    if by_costs:
        text += (
            f" By the costs of the steps that were made, it has {statistics.median(by_costs):.3f} of the best way's "
            f"speed in the median of cells, and at least {min(by_costs):.3f}."
        )
    summary = {"entries": list(entries), "median": middle, "least": worst["over_best"], "over_plain": plain}
    return Findings(tables=[Table(head=head, lines=lines)], text=text, summary=summary)


def asked_as(job: Mapping[str, Any]) -> list[str]:
    """What a fresh Python is started with to do a job."""
    return ["-m", "recipes.never_loses", json.dumps(job)]


def main(
    out: options.Out = None,
    target: options.Target = None,
    drafter: options.Drafter = None,
    lengths: Annotated[str, typer.Option(help="Fixed draft lengths beside the default.")] = "1,2,3,4,5,6,7,8",
    requests: options.AtOnce = "1,2,4,8",
    temperatures: options.Temperatures = "0,1",
    states: Annotated[str, typer.Option(help="What earlier processes left: empty, kept.")] = "empty,kept",
    max_new_tokens: options.MaxNewTokens = 96,
    rounds: options.Rounds = 3,
    passes: Annotated[int, typer.Option(min=2, help="Turns of each way in a process.")] = PASSES,
    threads: options.Threads = 2,
) -> list[dict[str, Any]]:
    """Measure the default settings beside plain decoding and every fixed length, in fresh processes."""
    given = {**locals(), "target": None if target is None else Path(target).name}
    counts, warmths = options.whole_numbers("--requests", requests), options.numbers("--temperatures", temperatures)
    named = Label.each(options.words(states, "--states", STATES))
    cells = cells_of(warmths, counts)
    with folder(out, "never_loses", given) as place, tempfile.TemporaryDirectory() as scratch:
        common = {
            "target": target,
            "drafter": drafter,
            "lengths": options.whole_numbers("--lengths", lengths),
            "max_new_tokens": max_new_tokens,
            "passes": passes,
            "threads": threads,
            "kept": str((Path(scratch) if out is None else out.absolute()) / "kept"),
        }

        def measured(turn: Turn[Label, Cell]) -> Row:
            head = {**asdict(turn.job), "state": turn.way.name, "round": turn.round}
            return {**head, **row_of(asked_as({**common, **head, "prepare": False}), threads)}

        if any(state.name == "kept" for state in named):
            # Costs are measured at leisure, as `outrider prepare` does.
            first = {**common, **asdict(cells[0]), "state": "kept", "round": 0, "prepare": True}
            row_of(asked_as(first), threads)
        entries = summarise(place.take("measured", turns(named, cells, rounds=rounds), measured))
        place.finish(findings(entries))
        return entries


if __name__ == "__main__":
    answer(sys.argv[1])
