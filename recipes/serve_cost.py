"""What the server costs beyond its engine: per step, and to the first token; and its rate beside vLLM's server.

`python -m recipes serve_cost --out DIR` compares the engine, driven by hand in this process, with `outrider serve` in
another one, with the same models, options and requests, in turns:

- a step: 8 requests at once, greedy, which all go on for as many tokens. The time of a step is the time from a
  request's first tokens to its last, over the steps between; the median over the requests. Over HTTP the client takes
  the times. Goal: 0.3 ms more than the engine's own.
- the first token: one request at a time, with a prompt that shares nothing with earlier ones; over HTTP from opening
  the connection. Goal: 10 ms more than the engine's own.

Plain decoding emits one token a step, so its server writes most; `drafts` has chains of three.

With `--vllm-python PATH` vLLM's own server decodes the same requests with the same weights on the same cores, at 1 and
8 at once, beside `outrider serve` with its default settings, and beside one that keeps the cache of ended requests in
slots of their own, as vLLM does; each turn has the same prompts. `--target DIR` and `--drafter` name other models.

The client shares the machine with the server, so it only notes when bytes come, and reads them at the end.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

import outrider
from outrider.bench.evidence import Row
from outrider.bench.folder import Folder, folder
from outrider.bench.report import Findings, Table
from outrider.bench.turns import Turn, turns
from outrider.bench.workloads.workload import PROMPTS
from outrider.core.types import Sampling
from outrider.embedded import EMBEDDED_TARGET
from outrider.engine.engine import Engine
from recipes import options
from recipes.label import Label
from recipes.quartiles import quartiles, spread
from recipes.serve_clients import Answer, completed
from recipes.serve_load import Way, rate_row, requests_of
from recipes.served import VLLM_MODES, Served, served, vllm_served

QUICK = {"ways": "plain", "batch": 2, "tokens": 12, "rounds": 1, "levels": "", "warm_up": 1}
STEP_GOAL, FIRST_GOAL = 0.3, 10.0
"""Most milliseconds that the server may add to a step of 8 requests, and to the first token."""
SETTLE = 1.0
"""Seconds before a turn in which a server may end what it does behind its last answer."""
GREEDY = Sampling(temperature=0, seed=0)
WAYS: Mapping[str, Mapping[str, str]] = {"plain": {"drafter": "none"}, "drafts": {"length": "fixed:3"}}
"""Options of engine and server, by the name of the job."""


SIDES = Label.each(("engine", "server"))


def asked_of(prompts: Sequence[str], number: int, tokens: int) -> list[dict[str, Any]]:
    """Requests whose prompts share nothing with those of another number."""
    return [
        {"prompt": f"{number} {i}. {text}", "temperature": 0, "max_tokens": tokens, "ignore_eos": True}
        for i, text in enumerate(prompts)
    ]


def by_hand(engine: Engine, asked: Sequence[Mapping[str, Any]]) -> list[Answer]:
    """What the engine makes of requests that come at once."""
    began = time.perf_counter()
    firsts: dict[str, float] = {}
    lasts: dict[str, float] = {}
    found: dict[str, Answer] = {}
    ids = [
        engine.add(each["prompt"], max_new_tokens=each["max_tokens"], sampling=GREEDY, ignore_eos=True)
        for each in asked
    ]
    while engine.busy:
        updates = engine.step()
        now = time.perf_counter() - began
        for update in updates:
            firsts.setdefault(update.id, now)
            lasts[update.id] = now
            if (output := update.output) is not None:
                found[update.id] = Answer(
                    status=200,
                    tokens=tuple(output.tokens),
                    first=firsts[update.id],
                    last=now,
                    seconds=now,
                    steps=output.num_steps,
                )
    engine.rest()
    return [found[id] for id in ids]


def step_milliseconds(answers: Sequence[Answer]) -> float:
    """The time of a step: the median over requests. Raises RuntimeError if an answer failed."""
    found = []
    for answer in answers:
        if answer.status != 200 or answer.first is None or answer.last is None or not answer.steps:
            raise RuntimeError(f"a request failed: {answer}")
        found.append(1000 * (answer.last - answer.first) / max(1, answer.steps - 1))
    return statistics.median(found)


def summarise(rows: Sequence[Row], name: str) -> list[dict[str, Any]]:
    """For each job: both sides, and what the server adds, over rounds.

    Args:
        name: The figure of a row, in milliseconds.
    """
    found = []
    for job in dict.fromkeys(row["job"] for row in rows):
        sides = {
            side.name: {row["round"]: row[name] for row in rows if (row["job"], row["side"]) == (job, side.name)}
            for side in SIDES
        }
        engine, server = sides["engine"], sides["server"]
        added = [server[k] - engine[k] for k in sorted(engine)]
        found.append(
            {
                "job": job,
                "engine": spread(list(engine.values())),
                "server": spread(list(server.values())),
                "added": spread(added),
            }
        )
    return found


def findings(
    steps: Sequence[dict[str, Any]], firsts: Sequence[dict[str, Any]], rates: Sequence[Row], batch: int
) -> Findings:
    """Tables and a sentence."""
    head = ("", "engine, ms", "server, ms", "the server adds, ms", "goal")
    tables = []
    for title, entries, goal in (
        (f"A step of {batch} requests", steps, STEP_GOAL),
        ("The first token of a request", firsts, FIRST_GOAL),
    ):
        lines = [[e["job"], *(quartiles(e[side]) for side in ("engine", "server", "added")), goal] for e in entries]
        tables.append(Table(head=head, lines=lines, title=title))
    speeds: list[dict[str, Any]] = []
    for level in sorted({row["concurrency"] for row in rates}):
        for way in dict.fromkeys(row["way"] for row in rates):
            own = [row["tokens"] / row["seconds"] for row in rates if (row["way"], row["concurrency"]) == (way, level)]
            speeds.append({"way": way, "concurrency": level, "rate": spread(own)})
    if speeds:
        lines = [[s["concurrency"], s["way"], quartiles(s["rate"], ".1f")] for s in speeds]
        tables.append(Table(head=("requests at once", "server", "tokens/s"), lines=lines, title="Rates"))
    worst = max(e["added"]["median"] for e in steps)
    latest = max(e["added"]["median"] for e in firsts)
    text = (
        f"The server adds {worst:.2f} ms to a step of {batch} requests (goal {STEP_GOAL}) and {latest:.1f} ms to the "
        f"first token (goal {FIRST_GOAL:g}): medians of differences between runs of one round, with quartiles."
    )
    return Findings(tables=tables, text=text, summary={"steps": steps, "firsts": firsts, "rates": speeds})


def rates(
    place: Folder,
    levels: Sequence[Label],
    rounds: int,
    asked: Sequence[Mapping[str, Any]],
    ours: Mapping[str, Sequence[str]],
    theirs: Mapping[str, Callable[[], AbstractContextManager[Served]]],
    threads: int,
) -> list[Row]:
    """The rates of our servers and of vLLM's, in turns; all are loaded, and one works at a time.

    Args:
        ours: Options of each of our servers.
        theirs: What starts each of vLLM's.
    """
    with ExitStack() as stack:
        servers = {name: stack.enter_context(served(given, threads=threads)) for name, given in ours.items()}
        servers |= {name: stack.enter_context(start()) for name, start in theirs.items()}
        ways = [Way(name=name) for name in servers]

        def rated(turn: Turn[Way, Label]) -> Row:
            time.sleep(SETTLE)
            return rate_row(servers[turn.way.name], asked, turn.job.value, turn.way)

        place.take("warm-up of rates", turns(ways, levels), rated)
        return place.take("rates", turns(ways, levels, rounds=rounds), rated)


def _written(given: Mapping[str, str | None]) -> list[str]:
    """Options as a command line has them; those that are None are left out."""
    named = {name.replace("_", "-"): value for name, value in given.items() if value is not None}
    return [part for name, value in named.items() for part in (f"--{name}", value)]


def main(
    out: options.Out = None,
    target: options.Target = None,
    ways: Annotated[str, typer.Option(help="What is decoded: plain, drafts.")] = "plain,drafts",
    batch: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 8,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each output.")] = 128,
    warm_up: Annotated[int, typer.Option(min=1, help="Rounds that are not counted.")] = 2,
    levels: Annotated[str, typer.Option(help="Requests at once beside vLLM's server.")] = "1,8",
    requests: Annotated[int, typer.Option(min=1, help="Requests of one turn beside vLLM's server.")] = 32,
    rounds: options.Rounds = 9,
    vllm_python: Annotated[Path | None, typer.Option(help="A Python that has vLLM; without it, ours alone.")] = None,
    vllm_modes: Annotated[str, typer.Option(help="How vLLM decodes: plain, ngram.")] = "plain,ngram",
    drafter: Annotated[str | None, typer.Option(help="Our drafter beside vLLM; by default that of serve.")] = None,
    dtype: options.Dtype = "auto",
    threads: options.Threads = 1,
) -> Mapping[str, Any]:
    """Measure what the server adds to its engine, and its rate beside vLLM's server."""
    given = {**locals(), "target": target and Path(target).name, "vllm_python": vllm_python is not None}
    jobs = Label.each(options.words(ways, "--ways", WAYS))
    modes = options.words(vllm_modes, "--vllm-modes", VLLM_MODES) if vllm_python is not None else []
    counts = Label.each(options.whole_numbers("--levels", levels), "{} at once") if levels else []
    common = {"dtype": dtype, "target": target}
    prompts = [each["prompt"] for each in requests_of(PROMPTS, batch)]
    with folder(out, "serve_cost", given) as place:
        with ExitStack() as stack:
            engines = {
                job.name: outrider.load(**common, **WAYS[job.name], max_slots=batch, threads=threads)  # type: ignore[arg-type]
                for job in jobs
            }
            servers = {
                job.name: stack.enter_context(
                    served(_written({**common, "max_slots": str(batch), **WAYS[job.name]}), threads=threads)
                )
                for job in jobs
            }

            def answers(turn: Turn[Label, Label], asked: Sequence[Mapping[str, Any]]) -> list[Answer]:
                if turn.way.name == "engine":
                    return by_hand(engines[turn.job.name], asked)
                return completed(servers[turn.job.name].port, asked)

            def step(turn: Turn[Label, Label]) -> Row:
                made = answers(turn, asked_of(prompts, turn.round, tokens))
                return {"side": turn.way.name, "job": turn.job.name, "step": step_milliseconds(made)}

            def first(turn: Turn[Label, Label]) -> Row:
                made = [answers(turn, asked_of([text], 1000 + turn.round, 4))[0] for text in prompts]
                times = [1000 * answer.first for answer in made if answer.first is not None]
                return {"side": turn.way.name, "job": turn.job.name, "first": statistics.median(times)}

            place.take("warm-up", turns(SIDES, jobs, rounds=warm_up), step)
            steps = summarise(place.take("step", turns(SIDES, jobs, rounds=rounds), step), "step")
            firsts = summarise(place.take("first", turns(SIDES, jobs, rounds=rounds), first), "first")
            engines.clear()
        made: list[Row] = []
        if counts and vllm_python is not None:
            slots = max(level.value for level in counts)
            own = _written({**common, "max_slots": str(slots), "drafter": drafter})
            ours = {"outrider": own}
            ours[f"outrider, {requests} warm slots"] = [*own, "--max-warm-slots", str(requests)]
            model = str(EMBEDDED_TARGET) if target is None else target
            theirs = {
                f"vLLM, {mode}": partial(
                    vllm_served, vllm_python, model, mode, dtype=dtype, slots=slots, threads=threads
                )
                for mode in modes
            }
            asked = [{**each, "ignore_eos": True} for each in requests_of(PROMPTS, requests)]
            made = rates(place, counts, rounds, asked, ours, theirs, threads)
        found = findings(steps, firsts, made, batch)
        place.finish(found)
    return found.summary or {}
