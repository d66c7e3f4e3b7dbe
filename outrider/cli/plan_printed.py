"""The printing of `outrider plan`: the advice, the ways behind it, and loads."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from outrider.cli.printed import table
from outrider.plan.prediction import PlanPrediction
from outrider.plan.record import RecordedRun
from outrider.plan.simulation import Simulated
from outrider.plan.verdict import Advice
from outrider.plan.ways import DraftConfiguration

MAX_ROWS = 8
"""Ways that are printed for each number of requests."""
WIDTH = 120
"""Columns of a table at least, so that a file gets whole words."""


def record_values(record: RecordedRun) -> dict[str, Any]:
    """What a plan was made from, as values of JSON."""
    return {
        "texts": len(record.texts),
        "tokens": sum(len(text.tokens) for text in record.texts),
        "temperature": record.temperature,
        "slowness": record.slowness,
        "header": dict(record.header),
    }


def print_advice(advice: Advice, record: RecordedRun) -> None:
    """Print the sentence, and a table for each number of requests."""
    console = _console()
    console.print(advice.sentence())
    for requests, ranked in advice.by_requests.items():
        columns = ("way", "times plain", "tokens/s", "ms/token", "tokens/step", "breaks even at")
        ways = table(columns, f"{requests} at once", no_wrap=True)
        for each in _shown(ranked):
            mark = "≥ " if each.way.certainty == "at least" else ""
            ways.add_row(
                each.way.name,
                f"{mark}{each.speedup.value:.2f} ({each.speedup.low:.2f} to {each.speedup.high:.2f})",
                f"{each.tokens_per_second.value:.0f}",
                f"{1000 * each.latency.value:.2f}",
                f"{mark}{each.block_efficiency.value:.2f}",
                f"{each.break_even:.2f}",
            )
        console.print(ways)
    tokens = sum(len(text.tokens) for text in record.texts)
    console.print(
        f"from {tokens} tokens of {len(record.texts)} prompts at temperature {record.temperature:g}; intervals of 90 %"
    )
    notes = dict.fromkeys(note for ranked in advice.by_requests.values() for each in ranked[:1] for note in each.notes)
    for note in notes:
        console.print(note)


def print_loads(loads: Mapping[DraftConfiguration, Sequence[Simulated]]) -> None:
    """Print what users see under each load."""
    columns = ("way", "requests/s", "tokens/s", "TTFT p50, p99 (ms)", "TPOT p50, p99 (ms)", "in a step", "keeps up")
    simulated = table(columns, "simulated loads", no_wrap=True)
    for way, simulations in loads.items():
        for each in simulations:
            simulated.add_row(
                way.name,
                f"{each.rate:g}",
                f"{each.tokens_per_second:.0f}",
                f"{1000 * each.ttft.p50:.0f}, {1000 * each.ttft.p99:.0f}",
                f"{1000 * each.tpot.p50:.1f}, {1000 * each.tpot.p99:.1f}",
                f"{each.mean_running:.1f}",
                "yes" if each.keeps_up else "no",
            )
    _console().print(simulated)


def _console() -> Console:
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, WIDTH)
    return console


def _shown(predictions: Sequence[PlanPrediction]) -> list[PlanPrediction]:
    """The best ways, plain decoding, and the best way of every drafter."""
    best = {each.way.drafter: each for each in reversed(predictions)}
    kept = [*predictions[:MAX_ROWS], *best.values()]
    return [each for each in predictions if each in kept]
