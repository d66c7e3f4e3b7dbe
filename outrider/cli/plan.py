"""outrider plan: predict what each way of decoding brings, and say what to use. Imports nothing heavy."""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.cli.request import RequestOptions
from outrider.core import progress
from outrider.core.inputs import InputError, unknown
from outrider.core.option import CheckedOptions, option
from outrider.setup import Setup

if TYPE_CHECKING:
    from outrider.drafters.protocol import Drafter
    from outrider.engine.engine import Engine
    from outrider.lengths.costs import CostTable
    from outrider.plan.prediction import Planner
    from outrider.plan.record import RecordedRun
    from outrider.plan.ways import DraftConfiguration
else:
    Drafter = Engine = CostTable = Planner = RecordedRun = DraftConfiguration = object

MAX_NEW_TOKENS, PROMPTS, DEPTH = 64, 16, 8
"""Tokens of a recorded text, most prompts, and deepest draft token, where nothing is named."""
SECONDS = 60.0
"""Seconds within which prompts are recorded where their number is not named."""
MOST_DOUBT = 0.05
"""Relative standard error of kept costs above which they are measured again, thoroughly."""
USUAL = ("suffix", "ngram")
"""Drafters that every target can have."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions(CheckedOptions):
    """What is planned for.

    Attributes:
        prompt_file: Your prompts: a text file (one prompt), or JSON lines with `prompt`, `turns` or `messages`. By
            default the prompts that ship with Outrider.
        num_prompts: How many of them are recorded; 0 takes all. By default at most 16, and as many as a minute allows.
        requests: Requests at once; several numbers with commas.
        context: Tokens of a request for which times are predicted. By default those of the record.
        record: Keep the recorded run in this file, or read it from there.
        apply: Write a configuration for the first number of requests; `outrider generate --config` reads it.
        devices: Predict for a machine that is not here, from a roofline: a100, h100, h200, l40s, mi300x or rtx4090.
        rate: Simulate requests that come at so many per second (Poisson); several with commas.
    """

    prompt_file: Path | None = None
    num_prompts: int | None = option(None, least=0, note=" (0 takes all)")
    requests: str = "1,2,4,8"
    context: int | None = option(None, least=1)
    record: Path | None = None
    apply: Path | None = None
    devices: str | None = None
    rate: str | None = None


def plan(
    setup: Setup,
    request: RequestOptions,
    options: PlanOptions,
    drafters: Sequence[str],
    flags_for: str | None,
    as_json: bool,
) -> None:
    """Record or read a run, measure or read costs, predict, and print.

    Args:
        drafters: More drafters to compare.
        flags_for: The engine whose flags are printed.
    """
    with progress.importing():
        from outrider.assembly import completed
        from outrider.cli.bench import numbers
        from outrider.cli.opened import opened
        from outrider.cli.plan_printed import print_advice, print_loads, record_values
        from outrider.cli.printed import print_json
        from outrider.plan.exports import ENGINES, exported
        from outrider.plan.prediction import Planner
        from outrider.plan.roofline import device_of, estimated
        from outrider.plan.simulation import simulate
        from outrider.plan.verdict import Advice
        from outrider.plan.ways import DraftConfiguration

    wanted = [int(each) for each in numbers("requests", options.requests, whole=True)]
    rates = [] if options.rate is None else numbers("rate", options.rate)
    for name in ("tree", "verifier", "length", "decoding"):
        if name in setup.options():
            raise InputError(f"plan compares all trees, verifiers and lengths; leave out --{name}")
    if flags_for is not None and flags_for not in ENGINES:
        raise unknown("engine", flags_for, ENGINES)
    device = None if options.devices is None else device_of(options.devices)
    engine = opened(replace(setup, drafter=completed(setup).drafter, length="fixed:4", probe=False))
    with progress.shown("planning"):
        parts = drafters_of(setup, engine, drafters)
        if device is None:
            with progress.task("measuring steps"):
                costs = costs_of(engine, parts)
        else:
            costs = {name: estimated(engine.parts, drafter, device) for name, drafter in parts.items()}
        with progress.task("recording what the target writes and what each drafter guesses"):
            record = recorded(engine, parts, request, options, [] if device else list(costs.values()))
        planner = Planner(record=record, costs=costs, context=options.context, estimated=device is not None)
        planner, ways = with_ways(planner, engine, parts, wanted, timed=device is None, reproducible=setup.reproducible)
        advice = Advice.of(planner, ways, wanted)
        best = advice.chosen(wanted[0]).way
        compared = list(dict.fromkeys([DraftConfiguration(), best]))
        loads = {way: [simulate(planner, way, rate=rate, slots=engine.max_slots) for rate in rates] for way in compared}
    if options.apply is not None:
        replace(setup, **best.options()).save(options.apply)
    flags = None if flags_for is None else exported(advice, flags_for)
    if as_json:
        print_json(
            {
                **advice.values(),
                "record": record_values(record),
                "loads": [{"way": way.name, **asdict(each)} for way, runs in loads.items() for each in runs],
                "flags": flags,
            }
        )
        return
    print_advice(advice, record)
    if rates:
        print_loads(loads)
    if flags is not None:
        print(flags or "(no flags: do not speculate)")


def with_ways(
    planner: "Planner",
    engine: "Engine",
    drafters: "dict[str, Drafter]",
    requests: Sequence[int],
    *,
    timed: bool,
    reproducible: bool,
) -> "tuple[Planner, list[DraftConfiguration]]":
    """All ways to compare, and a planner that knows what steps with their trees take.

    Args:
        timed: Whether steps are timed on this machine; otherwise a data sheet says what they take.
        reproducible: Whether only ways whose texts are those of plain decoding count.
    """
    from outrider.plan.ways import DraftConfiguration, ways_of

    ways = [DraftConfiguration()]
    for name, drafter in drafters.items():
        ways += ways_of(name, drafter, lengths=range(1, DEPTH + 1), reproducible=reproducible)
    if timed:
        planner = with_trees(planner, engine, drafters, ways, requests)
    if not reproducible:
        grown = [tree for tree in best_trees(planner, drafters, requests) if tree not in ways]
        ways += grown
        if timed:
            planner = with_trees(planner, engine, drafters, grown, requests)
    return planner, ways


def best_trees(
    planner: "Planner", drafters: "dict[str, Drafter]", requests: Sequence[int]
) -> "list[DraftConfiguration]":
    """For each drafter with rows, the best tree of its likeliest tokens for each number of requests."""
    from outrider.plan.ways import best_tree

    trees = [
        best_tree(
            name,
            drafter,
            planner.record.drafts[name],
            planner.costs[name],
            requests=count,
            sampled=planner.record.temperature > 0,
            context=planner.context or planner.record.context,
            dearer=dearer_trees(planner, name, count),
        )
        for name, drafter in drafters.items()
        for count in requests
    ]
    return list(dict.fromkeys(way for way in trees if way is not None))


def dearer_trees(planner: "Planner", drafter: str, requests: int) -> float:
    """How many times as long the trees of a drafter take as chains tell, for most of those that were timed."""
    timed = [planner.dearer(way, requests) for way in planner.trees.over_plain if way.drafter == drafter]
    return statistics.median(timed) if timed else 1.0


def with_trees(
    planner: "Planner",
    engine: "Engine",
    drafters: "dict[str, Drafter]",
    ways: "Sequence[DraftConfiguration]",
    requests: Sequence[int],
) -> "Planner":
    """The planner with the times of those ways that are trees."""
    from outrider.plan.tree_times import time_trees

    times = planner.trees
    for name, drafter in drafters.items():
        engine.rest()
        drafter_ways = [way for way in ways if way.drafter == name]
        parts = replace(engine.parts, drafter=drafter)
        times = times.joined(time_trees(parts, drafter_ways, requests, sampled=planner.record.temperature > 0))
    return replace(planner, trees=times)


def drafters_of(setup: Setup, engine: "Engine", more: Sequence[str]) -> "dict[str, Drafter]":
    """The drafters that are compared, by what was written: the setup's, those of `--with`, and what looks tokens up."""
    from outrider.assembly import assemble, completed

    setup_drafter = str(completed(setup).drafter)
    compared = {setup_drafter: engine.parts.drafter}
    for name in dict.fromkeys([*more, *USUAL]):
        if name not in compared:
            other = assemble(replace(setup, drafter=name, length="fixed:4", probe=False), target=engine.parts.target)
            compared[name] = other.parts.drafter
    return {name: drafter for name, drafter in compared.items() if drafter.max_depth != 0}


def costs_of(engine: "Engine", drafters: "dict[str, Drafter]") -> "dict[str, CostTable]":
    """The costs of steps with each drafter: kept ones, otherwise measured ones. Drafters that cannot draft go."""
    from outrider.plan.table import costs_of as kept_or_measured

    tables: dict[str, Any] = {}
    for name, drafter in list(drafters.items()):
        engine.rest()
        parts = replace(engine.parts, drafter=drafter)
        table = kept_or_measured(parts, max_slots=engine.max_slots, probe=True, most_doubt=MOST_DOUBT)
        if table is None:
            print(f"{name}: left out, because it proposed nothing in the probe", file=sys.stderr)
            del drafters[name]
        else:
            tables[name] = table
    if not tables:
        raise InputError("no drafter can draft with this target")
    return tables


def recorded(
    engine: "Engine",
    drafters: "dict[str, Drafter]",
    request: RequestOptions,
    options: PlanOptions,
    costs: "Sequence[CostTable]",
) -> "RecordedRun":
    """The record in the file, if it is of the same models, prompts and settings; otherwise a new one."""
    from outrider.cli.prompts import read_file, read_prompts
    from outrider.embedded import ASSETS
    from outrider.host.remembered import machine
    from outrider.lm.fingerprint import fingerprint
    from outrider.plan.record import RecordedRun, hash_of
    from outrider.plan.recording import record

    if options.prompt_file is None:
        prompts = read_prompts((ASSETS / "prompts.jsonl").read_text(encoding="utf-8"))
    else:
        prompts = read_file(options.prompt_file)
    if wanted := PROMPTS if options.num_prompts is None else options.num_prompts:
        prompts = prompts[:: max(1, len(prompts) // wanted)][:wanted]
    tokens = [engine.encode(prompt) for prompt in prompts]
    sampling, count = request.sampling(engine.sampling), request.max_new_tokens or MAX_NEW_TOKENS
    header: dict[str, Any] = {}
    if options.record is not None:
        target = engine.parts.target
        header = {
            "target": fingerprint(*target.modules.values()),
            "drafters": {name: fingerprint(*drafter.modules.values()) for name, drafter in drafters.items()},
            "tokenizer": None if engine.tokenizer is None else hash_of(engine.tokenizer.get_vocab()),
            "prompts": hash_of(tokens),
            "sampling": repr(sampling),
            "max_new_tokens": count,
            "versions": machine(target.device)["versions"],
        }
        if options.record.exists():
            kept = RecordedRun.read(options.record)
            if other := [name for name, value in header.items() if kept.header.get(name) != value]:
                raise InputError(
                    f"{options.record} is of other {', '.join(other)}; name another file, or delete it to record anew"
                )
            return kept
    run = record(
        engine,
        drafters,
        tokens,
        sampling=sampling,
        max_new_tokens=count,
        depth=DEPTH,
        costs=costs,
        max_seconds=SECONDS if options.num_prompts is None else None,
    )
    run = replace(run, header=header)
    if options.record is not None:
        run.save(options.record)
    return run
