"""outrider bench: configurations against plain decoding and other engines, side by side. Imports nothing heavy."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.cli.request import DRAWING, RequestOptions
from outrider.core import progress
from outrider.core.inputs import InputError, shown
from outrider.core.option import check, option
from outrider.setup import Setup

if TYPE_CHECKING:
    from outrider.bench.evidence import Row
    from outrider.bench.side_by_side.arrivals import Load
    from outrider.bench.side_by_side.configuration import Configuration
    from outrider.bench.side_by_side.session import BenchPlan, Measurement
else:
    Row = Load = Configuration = Measurement = BenchPlan = object

NOT_MEASURED = ("json_schema", "regex", "grammar", "tools")
"""Options of requests that `bench` lacks: transformers and the other engines have no grammars, and texts no tools."""
MAX_NEW_TOKENS = 64
"""Tokens of an answer where no number is given."""
TIME_LIMIT = 110.0
"""Seconds of turns on the built-in prompts where no number is given, so that the whole command takes at most three
minutes."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What is measured, and when requests come.

    Attributes:
        configurations: TOML or JSON file with a table of options for each name, beside or instead of --with.
        sweep: Measure every value of an option, such as `length=fixed:1..8` or `tree=chain|iid:2`; may be given several
            times, for every combination.
        optuna: Try so many points of the sweep, which Optuna chooses by what the earlier ones brought.
        ray: Measure the points of the sweep on a Ray cluster, one at a time on each machine: its address, or `local`.
        workload: `built-in`; a file or a folder of JSON lines, JSON, CSV or Parquet; one of gsm8k, math500, humaneval,
            mbpp, mtbench; or the id of a data set on the Hub, as org/name:config:split.
        num_prompts: How many conversations, evenly over their categories; 0 takes all.
        rounds: How often every run is repeated.
        time_limit: Seconds after which no new turn begins. By default 110 for the built-in prompts, otherwise none.
        gate_limit: Seconds that the check of each configuration takes, about: a large model is checked on fewer tokens.
        concurrency: Conversations at once: the next begins when one ends. Several numbers with commas are measured one
            after the other. By default 1, unless --rate or --trace is given.
        rate: Conversations per second that come whether the engine keeps up or not (Poisson); several with commas.
        trace: Send requests when the workload says.
        trace_speed: How many times as fast as it says.
        trace_unit: Seconds of one unit of a trace's timestamps.
        trace_block: Prompt tokens that one hash of a trace stands for.
        objective: What a good request keeps, in milliseconds, such as `ttft:200`, `tpot:50` or `e2el:3000`; may be
            given several times. Good requests per second are then counted.
        peers: Other engines, with commas: transformers (plain), assisted (its own speculation), vllm, llama, ik_llama,
            openvino, openvino_int8, openvino_int4 (these two round the weights), flashspec, economize.
        peer_target: Directory of the target's checkpoint, for engines that do not read its GGUF file.
        peer_draft: The same of the draft model.
        peer_prompts: Prompts on which their greedy tokens are compared with the target's and with their own plain ones.
        peer_ways: Only these ways of other engines, with commas, such as `plain,ik_llama:plain -rtr`. By default all.
        vllm_python: A Python that has vLLM.
        openvino_python: A Python that has OpenVINO GenAI.
        flashspec_python: A Python that has FlashSpec.
        economize_python: A Python that has economize.
        llama_server: A llama-server of llama.cpp that you built.
        ik_llama_server: A llama-server of ik_llama.cpp that you built.
        environments: Folder of environments of other engines. By default in the user's cache.
        make_environments: Install the engines that are missing there; each takes minutes and gigabytes.
        out: Folder for rows, tables, plots and an HTML page. A run that was interrupted goes on there.
        export: Write the acceptance of the fastest configuration to this file of JSON, for other tools.
    """

    configurations: Path | None = None
    sweep: tuple[str, ...] = ()
    optuna: int | None = option(None, least=1)
    ray: str | None = None
    workload: str = "built-in"
    num_prompts: int = option(24, least=0, note=" (0 takes all)")
    rounds: int = 3
    time_limit: float | None = None
    gate_limit: float = 60.0
    concurrency: str | None = None
    rate: str | None = None
    trace: bool = False
    trace_speed: float = 1.0
    trace_unit: float = 0.001
    trace_block: int = 512
    objective: tuple[str, ...] = ()
    peers: str = "transformers"
    peer_target: Path | None = None
    peer_draft: Path | None = None
    peer_prompts: int = option(3, least=1)
    peer_ways: str | None = None
    vllm_python: Path | None = None
    openvino_python: Path | None = None
    flashspec_python: Path | None = None
    economize_python: Path | None = None
    llama_server: Path | None = None
    ik_llama_server: Path | None = None
    environments: Path | None = None
    make_environments: bool = False
    out: Path | None = None
    export: Path | None = None

    def __post_init__(self) -> None:
        if (self.optuna is not None or self.ray is not None) and not self.sweep:
            raise InputError("--optuna and --ray measure the points of a sweep; give --sweep, as in length=fixed:1..8")
        check(self)

    def limit(self) -> float | None:
        """Seconds after which no new turn begins."""
        if self.time_limit is None and self.workload == "built-in" and not self.sweep:
            return TIME_LIMIT
        return self.time_limit

    def loads(self, seed: int) -> "tuple[Load, ...]":
        """When requests come."""
        from outrider.bench.side_by_side.arrivals import ClosedLoop, OpenLoop, Trace

        loads: list[Load] = []
        wanted = self.concurrency or ("1" if self.rate is None and not self.trace else None)
        if wanted is not None:
            loads += [ClosedLoop(concurrency=int(each)) for each in numbers("concurrency", wanted, whole=True)]
        if self.rate is not None:
            loads += [OpenLoop(rate=each, seed=seed) for each in numbers("rate", self.rate)]
        if self.trace:
            loads.append(Trace(speed=self.trace_speed))
        return tuple(loads)


def numbers(name: str, text: str, *, whole: bool = False) -> list[float]:
    """The numbers of an option that takes several, each once.

    Example:
        >>> numbers("rate", "0.5,2")
        [0.5, 2.0]
    """
    try:
        values = [float(part) for part in text.split(",")]
        if not all(each > 0 and (not whole or each == int(each)) for each in values):
            raise ValueError
    except (ValueError, OverflowError) as error:
        kind = "whole numbers >= 1" if whole else "numbers > 0"
        raise InputError(f"{name} must be {kind} with commas between them, got {shown(text)}") from error
    return list(dict.fromkeys(values))


def bench(
    setup: Setup, request: RequestOptions, options: BenchOptions, configurations: Sequence[str], as_json: bool
) -> int:
    """Measure, print and write. Returns the exit status: 1 if the gate stopped a configuration."""
    with progress.importing():
        from outrider.cli.opened import check_undivided, tell_loading

    tell_loading()
    check_undivided(setup)
    plan = plan_of(setup, request, options, configurations)
    if options.out is not None:
        check_plots()
    if options.optuna is not None or options.ray is not None:
        from outrider.bench.side_by_side.sweep import run_sweep
        from outrider.cli.bench_printed import print_sweep

        points = run_sweep(plan, axes_of(options), trials=options.optuna, ray=options.ray)
        print_sweep(points, as_json=as_json)
        return 1 if any(each.stopped for each in points) else 0
    from outrider.bench.side_by_side.export import write_profile
    from outrider.bench.side_by_side.session import measure
    from outrider.cli.bench_printed import print_measurement, print_requests
    from outrider.cli.printed import print_line

    with progress.shown():
        measurement = measure(
            plan, finish=write_report, tell=print_requests if as_json else lambda row: None, note=print_line
        )
    if options.export is not None:
        write_profile(measurement, options.export)
    print_measurement(measurement, as_json=as_json)
    return 1 if measurement.stopped else 0


def plan_of(setup: Setup, request: RequestOptions, options: BenchOptions, configurations: Sequence[str]) -> "BenchPlan":
    """What is measured. Raises InputError for options that make no sense, before a model is loaded."""
    from outrider.bench.side_by_side.configuration import DEFAULT, grid, parse_configuration, read_configurations
    from outrider.bench.side_by_side.metrics import Objectives
    from outrider.bench.side_by_side.session import BenchPlan
    from outrider.bench.workloads.formats import TraceUnits
    from outrider.core.types import Sampling
    from outrider.engine.generation import Generation

    wanted: list[Configuration] = [parse_configuration(text) for text in configurations]
    if options.configurations is not None:
        wanted += read_configurations(options.configurations)
    if options.sweep and options.optuna is None and options.ray is None:
        wanted += grid(axes_of(options))
    seed = request.seed or 0
    drawing = any(name in DRAWING and name != "seed" for name in request.options())
    generation = request.generation(Sampling())
    return BenchPlan(
        setup=setup,
        configurations=tuple(wanted) or (DEFAULT,),
        generation=Generation(
            max_new_tokens=request.max_new_tokens or MAX_NEW_TOKENS,
            # Each request has a seed of its own.
            sampling=replace(request.sampling(Sampling()), seed=None) if drawing else None,
            stop=generation.stop,
            stop_token_ids=generation.stop_token_ids,
            min_tokens=generation.min_tokens,
            ignore_eos=generation.ignore_eos,
        ),
        workload=options.workload,
        units=TraceUnits(seconds=options.trace_unit, block=options.trace_block),
        num_prompts=options.num_prompts or None,
        loads=options.loads(seed),
        rounds=options.rounds,
        time_limit=options.limit(),
        gate_limit=options.gate_limit,
        seed=seed,
        peers=peers_of(options),
        objectives=Objectives.parse(options.objective),
        out=options.out,
    )


def axes_of(options: BenchOptions) -> Any:
    """The axes of the sweep."""
    from outrider.bench.side_by_side.configuration import Axis

    return [Axis.parse(text) for text in options.sweep]


def peers_of(options: BenchOptions) -> Any:
    """The other engines."""
    from outrider.bench.side_by_side.peers import PeerOptions, usual_folder

    own = ("vllm", "openvino", "flashspec", "economize")
    pythons = _given(**{name: getattr(options, f"{name}_python") for name in own})
    servers = _given(llama=options.llama_server, ik_llama=options.ik_llama_server)
    names = [name.strip() for name in options.peers.split(",") if name.strip()]
    # A Python serves all engines whose names begin with its own.
    also = [each for each in (*pythons, *servers) if not any(name.startswith(each) for name in names)]
    return PeerOptions(
        names=tuple(dict.fromkeys([*names, *also])),
        target_folder=options.peer_target,
        draft_folder=options.peer_draft,
        environments=options.environments or usual_folder(),
        pythons=pythons,
        servers=servers,
        make=options.make_environments,
        num_compared=options.peer_prompts,
        ways=None if options.peer_ways is None else tuple(way.strip() for way in options.peer_ways.split(",")),
    )


def _given(**places: Path | None) -> dict[str, Path]:
    """Those that were given."""
    return {name: place for name, place in places.items() if place is not None}


def check_plots() -> None:
    """Raise InputError where nothing can be drawn, before anything is measured."""
    from importlib.util import find_spec

    from outrider.core.inputs import needs

    if find_spec("matplotlib") is None:
        raise needs("a report with plots (--out)", "matplotlib", "bench")


def write_report(measurement: "Measurement", place: Any) -> None:
    """Write the report of a measurement into its folder."""
    from outrider.bench.side_by_side.page import findings

    if place.place is not None and measurement.rows:
        place.write(findings(measurement), rows_inside=True)
        print(f"report: {place.place / 'report.html'}", file=sys.stderr)
