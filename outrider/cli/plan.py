"""outrider plan: predict what each way of decoding brings, and say what to use. Imports nothing heavy."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.cli.request import RequestOptions
from outrider.core.inputs import InputError
from outrider.setup import Setup

if TYPE_CHECKING:
    from outrider.drafters.protocol import Drafter
    from outrider.engine.engine import Engine
    from outrider.lengths.costs import CostTable
    from outrider.plan.record import Record
    from outrider.plan.verdict import Advice
else:
    Drafter = Engine = CostTable = Record = Advice = object

MAX_NEW_TOKENS, PROMPTS, DEPTH = 64, 16, 8
"""Tokens of a recorded text, number of prompts, and deepest draft token, where nothing is named."""
USUAL = ("suffix", "ngram")
"""Drafters that every target can have."""
MAX_ROWS = 8
"""Ways that are printed for each number of requests."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What is planned for.

    Attributes:
        prompt_file: Your prompts: a text file (one prompt), or JSON lines with `prompt`, `turns` or `messages`. By
            default the prompts that ship with Outrider.
        num_prompts: How many of them are recorded; 0 takes all.
        requests: Requests at once; several numbers with commas.
        context: Tokens of a request for which times are predicted. By default those of the record.
        record: Keep the recorded run in this file, or read it from there.
        apply: Write a configuration for the first number of requests; `outrider generate --config` reads it.
        for_engine: Print what another engine takes: vllm, sglang or llama.cpp.
        devices: Predict for a machine that is not here, from a roofline: a100, h100, h200, l40s, mi300x or rtx4090.
        rate: Simulate requests that come at so many per second (Poisson); several with commas.
    """

    prompt_file: Path | None = None
    num_prompts: int = PROMPTS
    requests: str = "1,2,4,8"
    context: int | None = None
    record: Path | None = None
    apply: Path | None = None
    for_engine: str | None = None
    devices: str | None = None
    rate: str | None = None

    def __post_init__(self) -> None:
        if self.num_prompts < 0:
            raise InputError(f"num_prompts must be >= 0 (0 takes all), got {self.num_prompts}")
        if self.context is not None and self.context < 1:
            raise InputError(f"context must be >= 1, got {self.context}")


def plan(setup: Setup, request: RequestOptions, options: PlanOptions, drafters: Sequence[str], as_json: bool) -> None:
    """Record or read a run, measure or read costs, predict, and print."""
    from outrider.cli.bench import numbers
    from outrider.cli.opened import opened
    from outrider.plan.prediction import Planner
    from outrider.plan.verdict import Advice
    from outrider.plan.ways import Way, ways_of

    wanted = [int(each) for each in numbers("requests", options.requests, whole=True)]
    for name in ("tree", "verifier", "length", "decoding"):
        if name in setup.given():
            raise InputError(f"plan compares all trees, verifiers and lengths; leave out --{name}")
    engine = opened(replace(setup, no_probe=True))
    parts = drafters_of(setup, engine, drafters)
    costs = costs_of(engine, parts)
    record = recorded(engine, parts, request, options, costs)
    planner = Planner(record=record, costs=costs, context=options.context)
    ways = [Way()]
    for name, drafter in parts.items():
        ways += ways_of(name, drafter, lengths=range(1, DEPTH + 1), reproducible=setup.reproducible)
    advice = Advice.of(planner, ways, wanted)
    _print(advice, record, as_json)
    if options.apply is not None:
        replace(setup, **advice.chosen(wanted[0]).way.options()).save(options.apply)


def drafters_of(setup: Setup, engine: "Engine", more: Sequence[str]) -> "dict[str, Drafter]":
    """The drafters that are compared, by what was written: the setup's, those of `--with`, and what looks tokens up."""
    from outrider.assembly import assemble, completed

    own = str(completed(setup).drafter)
    found = {own: engine.parts.drafter}
    for name in dict.fromkeys([*more, *USUAL]):
        if name not in found:
            other = assemble(replace(setup, drafter=name, length="fixed:4", no_probe=True), target=engine.parts.target)
            found[name] = other.parts.drafter
    return {name: drafter for name, drafter in found.items() if drafter.max_depth != 0}


def costs_of(engine: "Engine", drafters: "dict[str, Drafter]") -> "dict[str, CostTable]":
    """The costs of steps with each drafter: kept ones, otherwise measured ones. Drafters that cannot draft go."""
    from outrider.plan.table import costs_of as kept_or_measured

    found: dict[str, Any] = {}
    for name, drafter in list(drafters.items()):
        engine.rest()
        table = kept_or_measured(replace(engine.parts, drafter=drafter), max_slots=engine.max_slots, probe=True)
        if table is None:
            print(f"{name}: left out, because it proposed nothing in the probe", file=sys.stderr)
            del drafters[name]
        else:
            found[name] = table
    if not found:
        raise InputError("no drafter can draft with this target")
    return found


def recorded(
    engine: "Engine",
    drafters: "dict[str, Drafter]",
    request: RequestOptions,
    options: PlanOptions,
    costs: "dict[str, CostTable]",
) -> "Record":
    """The record in the file, if it is of the same models, prompts and settings; otherwise a new one."""
    from outrider.cli.prompts import read_file, read_prompts
    from outrider.embedded import ASSETS
    from outrider.host.remembered import machine
    from outrider.lm.fingerprint import fingerprint
    from outrider.plan.record import Record, hash_of
    from outrider.plan.recording import record

    if options.prompt_file is None:
        prompts = read_prompts((ASSETS / "prompts.jsonl").read_text(encoding="utf-8"))
    else:
        prompts = read_file(options.prompt_file)
    if options.num_prompts:
        prompts = prompts[:: max(1, len(prompts) // options.num_prompts)][: options.num_prompts]
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
            kept = Record.read(options.record)
            if other := [name for name, value in header.items() if kept.header.get(name) != value]:
                raise InputError(
                    f"{options.record} is of other {', '.join(other)}; name another file, or delete it to record anew"
                )
            return kept
    found = record(
        engine,
        drafters,
        tokens,
        sampling=sampling,
        max_new_tokens=count,
        depth=DEPTH,
        costs=next(iter(costs.values())),
    )
    found = replace(found, header=header)
    if options.record is not None:
        found.save(options.record)
    return found


def _print(advice: "Advice", record: "Record", as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from outrider.cli.printed import print_json

    if as_json:
        print_json(
            {
                **advice.values(),
                "record": {
                    "texts": len(record.texts),
                    "tokens": sum(len(text.tokens) for text in record.texts),
                    "temperature": record.temperature,
                    "slowness": record.slowness,
                    "header": dict(record.header),
                },
            }
        )
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(advice.sentence())
    for requests, found in advice.by_requests.items():
        table = Table(title=f"{requests} at once", title_justify="left", box=None)
        for name in ("way", "times plain", "tokens/s", "ms/token", "tokens/step", "breaks even at"):
            table.add_column(name, justify="left" if name == "way" else "right", no_wrap=True)
        plain = [each for each in found if each.way.is_plain]
        shown_ = [*found[:MAX_ROWS], *(each for each in plain if each not in found[:MAX_ROWS])]
        for each in shown_:
            mark = "≥ " if each.way.certainty == "at least" else ""
            table.add_row(
                each.way.name,
                f"{mark}{each.speedup.value:.2f} ({each.speedup.low:.2f} to {each.speedup.high:.2f})",
                f"{each.tokens_per_second.value:.0f}",
                f"{1000 * each.latency.value:.2f}",
                f"{mark}{each.block_efficiency.value:.2f}",
                f"{each.break_even:.2f}",
            )
        console.print(table)
    tokens = sum(len(text.tokens) for text in record.texts)
    console.print(
        f"from {tokens} tokens of {len(record.texts)} prompts at temperature {record.temperature:g}; intervals of 90 %"
    )
    for note in dict.fromkeys(
        note for found in advice.by_requests.values() for each in found[:1] for note in each.notes
    ):
        console.print(note)
