"""outrider bench --engine vllm: vLLM with the drafter, beside the same vLLM without one."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from outrider.cli.bench import BenchOptions
from outrider.cli.bench_remote import LOCAL, plan_of, print_figures
from outrider.cli.printed import print_line
from outrider.cli.request import RequestOptions
from outrider.cli.request_body import body_of
from outrider.core.inputs import InputError
from outrider.serve.client.bench import measure_remote, summary
from outrider.serve.vllm.counters import Acceptance
from outrider.serve.vllm.launch import check_request
from outrider.serve.vllm.options import EngineChoice
from outrider.serve.vllm.process import VllmProcess
from outrider.setup import Setup

OF_VLLM = ("vllm_python",)
"""Of the options of measurements in this process, those that vLLM needs too."""


def bench_vllm(
    setup: Setup,
    request: RequestOptions,
    options: BenchOptions,
    engine: EngineChoice,
    configurations: Sequence[str],
    as_json: bool,
) -> int:
    """Measure vLLM plainly, then with the drafter, and print both. Returns the exit status."""
    if configurations:
        raise InputError("--with is about Outrider's own engine; give the drafter with --drafter and --length")
    for name in LOCAL:
        if getattr(options, name) and name not in OF_VLLM:
            raise InputError(
                f"--{name.replace('_', '-')} is about Outrider's own engine; leave it out with --engine vllm"
            )
    drafting = engine.process(setup, options.vllm_python)
    try:
        return _measured(drafting, request, options, as_json)
    finally:
        drafting.stop()


def _measured(drafting: VllmProcess, request: RequestOptions, options: BenchOptions, as_json: bool) -> int:
    """Measure with the launch of a process, whose folder may hold the drafter, and without its drafter."""
    check_request(body_of(request), drafting.launch, drafting.python)
    plain = replace(drafting.launch, speculation=None)
    ways = [("vllm, plain", plain)]
    if drafting.launch != plain:
        ways.append((f"vllm, {drafting.launch.method}", drafting.launch))
    found: list[dict[str, Any]] = []
    for title, launch in ways:
        # One after the other: two that run at once would take each other's cores and memory.
        with VllmProcess(drafting.python, launch, tell=drafting.tell) as process:
            found += figures(title, process, request, options, (lambda line: None) if found else print_line)
    speeds = {each["load"]: each["output_throughput"] for each in found if each["engine"] == ways[0][0]}
    for each in found:
        each["speedup"] = each["output_throughput"] / speeds[each["load"]]
    if as_json:
        for each in found:
            print(json.dumps(each))
        return 0
    print_figures([each | {"load": f"{each['engine']}, {each['load']}"} for each in found])
    console = Console(highlight=False, soft_wrap=True)
    for each in found[len(speeds) :]:
        console.print(
            f"{each['engine']}, {each['load']}: {each['speedup']:.2f} times the tokens per second of plain vLLM"
        )
    return 0


def figures(
    title: str,
    process: VllmProcess,
    request: RequestOptions,
    options: BenchOptions,
    note: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """The figures of a vLLM at each load, with what its own counters say of the whole run."""
    plan = plan_of(process.remote, process.remote.models()[0], request, options)
    rows = measure_remote(plan, note=note)
    told = Acceptance.of_metrics(process.remote.text("/metrics"))
    counted = None if told is None else vars(told)
    return [
        {"engine": title, **summary(plan, [row for row in rows if row["load"] == load.name]), "speculation": counted}
        for load in plan.loads
    ]
