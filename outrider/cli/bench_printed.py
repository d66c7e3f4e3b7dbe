"""The printing of `outrider bench`, for people and for programs."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.bench.evidence import Row
from outrider.bench.side_by_side import metrics
from outrider.bench.side_by_side.page import summary
from outrider.bench.side_by_side.served import Served
from outrider.bench.side_by_side.session import Measurement
from outrider.bench.side_by_side.sweep import Point, best_first
from outrider.bench.side_by_side.verdict import headline

WIDTH = 120
"""Fewest columns of a table; a file or a pipe tells none."""


def print_requests(row: Row) -> None:
    """Print the requests of a turn, one line of JSON each."""
    for each in row["served"]:
        print(json.dumps(request_record(row, Served.read(each))), flush=True)


def request_record(row: Row, request: Served) -> dict[str, Any]:
    """A request as an object of JSON; times are seconds, and None is what an engine does not tell."""
    drafting = metrics.drafting([request])
    seconds = request.ended - request.arrived
    return {
        "way": row["method"],
        "load": row["load"],
        "round": row["round"],
        "id": request.id,
        "category": request.category,
        "turn": request.turn,
        "prompt_tokens": request.prompt_tokens,
        "num_tokens": request.num_tokens,
        "num_steps": len(request.steps) or None,
        "num_draft_tokens": sum(step.drafted for step in drafting),
        "num_accepted_tokens": sum(step.accepted for step in drafting),
        "block_efficiency": metrics.block_efficiency([request]),
        "acceptance_length": metrics.acceptance_length([request]),
        "arrived": request.arrived,
        "seconds": seconds,
        "tokens_per_second": request.num_tokens / seconds if seconds else None,
        "ttft": _only(metrics.time_to_first_token([request])),
        "tpot": _only(metrics.time_per_output_token([request])),
    }


def _only(values: Sequence[float]) -> float | None:
    return values[0] if values else None


def print_measurement(measurement: Measurement, *, as_json: bool) -> None:
    """Print the verdict and a table; with JSON the verdict goes to standard error, because requests were printed."""
    console = Console(stderr=as_json, highlight=False, soft_wrap=True, width=max(WIDTH, Console().width))
    console.print(headline(measurement), style="bold", markup=False)
    if not as_json:
        _print_table(console, summary(measurement))
    for title, reasons in (
        ("lossless", measurement.passed),
        ("stopped", measurement.stopped),
        ("left out", measurement.left_out),
    ):
        for what, why in reasons.items():
            console.print(f"{title}: {what}: {why}", style="yellow", markup=False)


def _print_table(console: Console, figures: Sequence[Mapping[str, Any]]) -> None:
    """The most important figures of each way."""
    table = Table(box=None)
    several = len({each["load"] for each in figures}) > 1
    heads = ("way", "tokens/s", "speedup", "TPOT ms", "TTFT ms", "tokens/step", "accepted")
    for head in (*(["load"] if several else []), *heads):
        words = head in ("load", "way")
        table.add_column(head, justify="left" if words else "right", no_wrap=not words, overflow="fold")
    for each in figures:
        table.add_row(*([each["load"]] if several else []), each["way"], *_cells(each))
    console.print(table)


def _cells(each: Mapping[str, Any]) -> list[str]:
    speedup = each["speedup"]
    ratio = "-" if speedup is None else "{:.2f} [{:.2f}, {:.2f}]".format(*speedup)
    times = ["-" if each[kind] is None else f"{1000 * each[kind]['mean']:.1f}" for kind in ("tpot", "ttft")]
    efficiency, rate = each["block_efficiency"], each["acceptance_rate"]
    return [
        f"{each['output_throughput']:.1f}",
        "baseline" if each["way"] == each["baseline"] else ratio,
        *times,
        "-" if efficiency is None else f"{efficiency:.2f}",
        "-" if rate is None else f"{rate:.0%}",
    ]


def print_sweep(points: Sequence[Point], *, as_json: bool) -> None:
    """Print the points of a sweep, the best first."""
    if as_json:
        for each in points:
            print(json.dumps(vars(each)), flush=True)
        return
    console = Console(highlight=False, soft_wrap=True, width=max(WIDTH, Console().width))
    table = Table(box=None)
    for head in ("configuration", "speedup", "tokens/s", "tokens/step"):
        words = head == "configuration"
        table.add_column(head, justify="left" if words else "right", no_wrap=not words, overflow="fold")
    for each in best_first(points):
        if each.speedup is not None:
            middle, low, high = each.speedup
            rate, efficiency = each.output_throughput, each.block_efficiency
            table.add_row(
                each.key,
                f"{middle:.2f} [{low:.2f}, {high:.2f}]",
                "-" if rate is None else f"{rate:.1f}",
                "-" if efficiency is None else f"{efficiency:.2f}",
            )
    console.print(table)
    for each in points:
        if each.reason is not None:
            word = "stopped" if each.stopped else "left out"
            console.print(f"{word}: {each.key}: {each.reason}", style="yellow", markup=False)
