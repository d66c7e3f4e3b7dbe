"""outrider prepare: compile the forwards of a target and its draft model or head, time their steps, and keep both."""

import time
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console

from outrider.cli.forwards import heads, models
from outrider.cli.opened import opened
from outrider.cli.printed import print_json
from outrider.core import progress
from outrider.core.inputs import InputError
from outrider.lengths.costs import CostTable
from outrider.lengths.protocol import LoadPolicy
from outrider.lm.choice import choose
from outrider.plan.probe import CONTEXT
from outrider.plan.table import measured
from outrider.setup import Setup


def prepare(setup: Setup, *, as_json: bool) -> None:
    """Make the libraries that are not there yet, time forwards and steps, and print what will be used from now on."""
    if setup.forward not in (None, "compiled"):
        raise InputError(f"prepare makes compiled forwards; leave out --forward {setup.forward}")
    prepared: list[dict[str, Any]] = []
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    engine = opened(replace(setup, forward="eager", probe=False))
    by_role = models(engine)
    if "target" not in by_role or by_role["target"].device.type != "cpu":
        raise InputError("only models without recurrent layers, on a CPU, have forwards that are compiled beforehand")
    for role, lm in by_role.items():
        if (reason := lm.why_not("compiled")) is not None and role != "target":
            console.print(f"{role}: not compiled, because {reason}", style="cyan")
            continue
        began = time.perf_counter()
        with progress.shown(f"{role}: compiling its forward"):
            lm.prepare()
            if role == "target" and engine.parts.drafter.taps:
                lm.prepare(engine.parts.drafter.taps)
        spent = time.perf_counter() - began
        with progress.shown(f"{role}: timing its forwards"):
            choice = choose(lm, forward=None, pad_to=setup.pad_to if role == "target" else 1, again=True)
        place = str(lm.package.folder)
        prepared.append(
            {
                "role": role,
                "folder": place,
                "seconds": spent,
                "forward": choice.forward,
                "pad_to": choice.pad_to,
                "narrow": choice.narrow,
                "milliseconds": {name: list(times) for name, times in choice.milliseconds.items()},
            }
        )
        if not as_json:
            console.print(f"{role}: ready after {spent:.0f} s, in {place}", style="cyan")
            console.print(f"{role}: {choice}")
    for head in heads(engine):
        began = time.perf_counter()
        with progress.shown("head: compiling its forwards"):
            head.prepare()
        spent, places = time.perf_counter() - began, [str(package.folder) for package in head.packages]
        prepared.append({"role": "head", "folders": places, "seconds": spent, "forward": head.forward})
        if not as_json:
            console.print(f"head: ready after {spent:.0f} s, in {', '.join(places)}", style="cyan")
    costs = None
    if isinstance(engine.parts.length, LoadPolicy):
        with progress.shown("timing steps of target and drafter, for up to half a minute"):
            costs = measured(engine.parts, max_slots=engine.max_slots, thorough=True)
    if as_json:
        rows = None if costs is None else [asdict(row) for row in costs.rows]
        print_json({"models": prepared, "costs": {"kept": costs is not None and costs.kept, "steps": rows}})
    elif costs is not None:
        console.print(_sentence(costs))


def _sentence(costs: CostTable) -> str:
    """What steps cost, and whether that is kept."""
    most = max(row.requests for row in costs.rows)
    times = []
    for requests in sorted({1, most}):
        steps = costs.steps(requests, sampled=False, context=CONTEXT, longest=4)[requests]
        times.append(f"{1000 * steps[0]:.1f} ms plain and {1000 * steps[4]:.1f} ms with a draft of 4 for {requests}")
    busy = "; not kept, because other processes took the cores" if costs.busy else ""
    return f"steps: {', '.join(times)}{busy}"
