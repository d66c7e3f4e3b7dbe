"""outrider bench --url: a server's speed over HTTP."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.bench.side_by_side.metrics import Objectives
from outrider.bench.workloads.formats import TraceUnits
from outrider.cli.bench import MAX_NEW_TOKENS, BenchOptions
from outrider.cli.bench_printed import WIDTH
from outrider.cli.printed import print_line
from outrider.cli.remote import RemoteOptions
from outrider.cli.request import RequestOptions
from outrider.cli.request_body import body_of
from outrider.core.inputs import InputError
from outrider.serve.client.bench import RemotePlan, measure_remote, summary
from outrider.serve.client.remote import Remote
from outrider.setup import Setup

LOCAL = ("configurations", "sweep", "optuna", "ray", "vllm_python", "openvino_python", "environments", "out", "export")
"""Options of measurements in this process."""


def bench_remote(
    setup: Setup,
    request: RequestOptions,
    options: BenchOptions,
    remote: RemoteOptions,
    configurations: Sequence[str],
    as_json: bool,
) -> int:
    """Measure a server and print its figures. Returns the exit status."""
    if configurations:
        raise InputError("--with and --url were given together; a server has one configuration")
    for name in LOCAL:
        if getattr(options, name):
            raise InputError(f"--{name.replace('_', '-')} is not for servers; leave it out with --url")
    found = remote.remote(setup)
    plan = plan_of(found, remote.chosen(found), request, options)
    rows = measure_remote(plan, note=print_line)
    figures = [summary(plan, [row for row in rows if row["load"] == load.name]) for load in plan.loads]
    if as_json:
        for each in figures:
            print(json.dumps(each))
    else:
        print_figures(figures)
    return 0


def plan_of(remote: Remote, card: Mapping[str, object], request: RequestOptions, options: BenchOptions) -> RemotePlan:
    """What is measured of a model that a server has.

    Args:
        card: What the server's list says of the model.
    """
    return RemotePlan(
        remote=remote,
        model=str(card["id"]),
        max_context=_context(card),
        workload=options.workload,
        units=TraceUnits(seconds=options.trace_unit, block=options.trace_block),
        num_prompts=options.num_prompts or None,
        max_new_tokens=request.max_new_tokens or MAX_NEW_TOKENS,
        loads=options.loads(request.seed or 0),
        rounds=options.rounds,
        seed=request.seed or 0,
        objectives=Objectives.parse(options.objective),
        fields={name: value for name, value in body_of(request).items() if name not in ("max_tokens", "seed")},
    )


def _context(card: Mapping[str, object]) -> int:
    """The longest context of a model. Raises InputError if the server does not tell it."""
    longest = card.get("max_model_len")
    if not isinstance(longest, int):
        raise InputError(
            "the server does not tell its longest context (max_model_len in /v1/models), which bench needs"
        )
    return longest


def print_figures(figures: Sequence[Mapping[str, Any]]) -> None:
    """The most important figures of each load."""
    console = Console(highlight=False, soft_wrap=True, width=max(WIDTH, Console().width))
    table = Table(box=None)
    for head in (
        "load",
        "requests/s",
        "tokens/s",
        "TTFT ms",
        "p99",
        "TPOT ms",
        "p99",
        "good/s",
        "tokens/draft",
        "accepted",
    ):
        table.add_column(head, justify="left" if head == "load" else "right", no_wrap=True)
    for each in figures:
        times = [
            "-" if each[kind] is None else f"{1000 * each[kind][name]:.1f}"
            for kind in ("ttft", "tpot")
            for name in ("mean", "p99")
        ]
        good, length, rate = each["goodput"], each["acceptance_length"], each["acceptance_rate"]
        table.add_row(
            each["load"],
            f"{each['request_throughput']:.2f}",
            f"{each['output_throughput']:.1f}",
            *times,
            "-" if good is None else f"{good:.2f}",
            "-" if length is None else f"{length:.2f}",
            "-" if rate is None else f"{rate:.0%}",
        )
    console.print(table)
