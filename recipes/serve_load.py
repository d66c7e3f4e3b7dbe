"""The server under load, with clients that vanish, pause and send garbage: does it stay right, small and fast?

`python -m recipes serve_load --out DIR` starts `outrider serve` with the embedded pair in float32. First each of some
requests, with prompts and outputs of many lengths, is answered alone. Then 64 clients send them for ten minutes, and a
third of the clients misbehaves: they leave in the middle of a stream, do not read for a while, close their half of the
connection, send no JSON, JSON that is too deep, bytes that are no UTF-8, or ten megabytes. These must hold:

- No error is the server's: well-behaved clients get all they asked for, the others a status of 400, 408 or 413.
- Every finished answer equals the answer that the same request got alone: greedy, token by token.
- The server's memory grows by at most 1 % per 1,000 requests, by a straight line through what it held after each
  hundred, the first third left out.
- A server that learns and is killed by SIGKILL leaves whole snapshots; one that is started again goes on from the
  newest, and answers as before.
- At the end no request is left, all slots work, and the server ends with status 0.

Then, without chaos, the default and plain decoding take turns at 1, 2, 4 ... 64 requests at once, each in a server of
its own (`--plain request`: in the same one, by requests that ask for no drafts). The figure is the quotient of their
tokens per second, the median over rounds.

Rates want a quiet machine. The rest does not depend on the clock.
"""

import asyncio
import json
import math
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from outrider.bench.evidence import Row
from outrider.bench.folder import folder
from outrider.bench.report import Findings, Table
from outrider.bench.turns import Turn, turns
from outrider.bench.workloads.workload import PROMPTS
from outrider.core.inputs import InputError
from recipes import options
from recipes.label import Label
from recipes.serve_clients import Answer, Tally, bad_client, complete, good_client
from recipes.served import Served, served

QUICK = {
    "minutes": 0.02,
    "clients": 6,
    "distinct": 4,
    "levels": "2",
    "requests": 2,
    "rounds": 1,
    "plain": "request",
    "kills": False,
}
ALLOWED_SLOPE, ALLOWED_SPEED = 0.01, 0.98
"""Most growth of memory per 1,000 requests, as a share; the least speed over plain decoding."""
SLOW_SECONDS = 2
"""For how long a client may leave too much unread."""
EVERY = 100
"""Finished answers between two looks at the server's memory; fewer in a short run."""
LEAST_REQUESTS = 300
"""Fewest finished answers from which a growth per 1,000 is told."""
DEFAULT, PLAIN = "default", "plain"


@dataclass(frozen=True, kw_only=True)
class Way:
    """A server, and what requests to it say besides.

    Attributes:
        options: Of `outrider serve`.
        asked: Fields of requests.
    """

    name: str
    options: tuple[str, ...] = ()
    asked: Mapping[str, Any] | None = None


def requests_of(prompts: Path, count: int) -> list[dict[str, Any]]:
    """Requests with prompts and outputs of many lengths, always the same ones."""
    lines = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    texts = [str(line.get("prompt") or line["turns"][0]) for line in lines]
    dice, found = random.Random(0), []
    for i in range(count):
        text = " ".join([texts[(i + k) % len(texts)] for k in range(1 + i % 3)])
        words = text.split()[:120]
        cut = " ".join(words[: max(3, dice.randrange(1 + len(words)))])
        asked = {"prompt": cut, "temperature": 0, "max_tokens": dice.choice((1, 8, 24, 64, 96))}
        found.append({**asked, "ignore_eos": True} if i % 4 == 0 else asked)
    return found


async def alone(port: int, asked: Sequence[Mapping[str, Any]]) -> list[Answer]:
    """What each request gets when nobody else is there."""
    found = [await complete(port, each) for each in asked]
    if wrong := [answer for answer in found if answer.status != 200 or answer.error is not None]:
        raise RuntimeError(f"a request failed alone: {wrong[0]}")
    return found


async def under_load(
    server: Served, asked: Sequence[Mapping[str, Any]], expected: Sequence[Answer], *, clients: int, seconds: float
) -> Tally:
    """Let clients, every third of them a bad one, send requests for so long."""
    tally, end = Tally(), time.monotonic() + seconds

    async def client(number: int) -> None:
        dice = random.Random(number)
        while time.monotonic() < end:
            i = dice.randrange(len(asked))
            if number % 3 == 2:
                await bad_client(server.port, asked[i], dice, tally)
            else:
                await good_client(server.port, asked[i], expected[i], tally)

    async def watch() -> None:
        every = min(EVERY, 10 if seconds < 60 else EVERY)
        while True:
            if not tally.memory or tally.finished >= tally.memory[-1][0] + every:
                tally.memory.append((tally.finished, server.memory()))
            await asyncio.sleep(0.1)

    watching = asyncio.ensure_future(watch())
    try:
        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(client(number))
    finally:
        watching.cancel()
    return tally


async def settle(server: Served) -> int:
    """Wait until the requests of clients that left are gone. Returns how many are left after ten seconds."""
    for _ in range(100):
        if not server.load():
            return 0
        await asyncio.sleep(0.1)
    return server.load()


def slope(memory: Sequence[tuple[int, int]]) -> float | None:
    """Growth of memory per 1,000 requests, as a share of what is held; None if there are too few requests.

    Args:
        memory: Finished requests and bytes. The first third of the requests warms up and is left out.

    Example:
        >>> slope([(100 * i, 1_000_000 + 500 * i) for i in range(30)])
        0.004975
    """
    last = memory[-1][0] if memory else 0
    points = np.array([point for point in memory if point[0] >= last / 3], dtype=np.float64).reshape(-1, 2)
    if last < LEAST_REQUESTS or len(points) < 3:
        return None
    growth = np.polyfit(points[:, 0], points[:, 1], 1)[0]
    return round(float(1000 * growth / points[0, 1]), 6)


def load_row(server: Served, asked: Sequence[Mapping[str, Any]], clients: int, seconds: float) -> Row:
    """The phase with chaos."""

    async def run() -> Row:
        expected = await alone(server.port, asked)
        tally = await under_load(server, asked, expected, clients=clients, seconds=seconds)
        left = await settle(server)
        # All slots at once, so that one which was lost would be missed.
        again = await asyncio.gather(*[complete(server.port, asked[i % len(asked)]) for i in range(clients)])
        wrong = [str(answer) for i, answer in enumerate(again) if answer.said != expected[i % len(asked)].said]
        said = [list(answer.said) for answer in expected]
        return {**asdict(tally), "left": left, "wrong_afterwards": wrong, "said": said}

    row = asyncio.run(run())
    metrics = server.metrics()
    served_errors = {
        name: value
        for name, value in metrics.items()
        if value and (('status="5' in name and "http_requests_total" in name) or 'finished_reason="error"' in name)
    }
    running = sum(value for name, value in metrics.items() if name.startswith("vllm:num_requests_"))
    return {**row, "slope": slope(row["memory"]), "served_errors": served_errors, "running": running}


def killed_row(asked: Sequence[Mapping[str, Any]], common: Sequence[str], threads: int) -> Row:
    """The phase in which a server that learns is killed in the middle of its work, and started again."""
    with tempfile.TemporaryDirectory() as scratch:
        kept = Path(scratch) / "kept"
        learns = (*common, "--length", "fixed:3", "--learn", "--learn-interval", "1", "--learn-snapshots", str(kept))

        async def until_killed(server: Served) -> None:
            async def client(number: int) -> None:
                while True:
                    await complete(server.port, asked[number % len(asked)])

            clients = [asyncio.ensure_future(client(number)) for number in range(8)]
            while not snapshots(kept) and not all(each.done() for each in clients):
                await asyncio.sleep(0.05)
            os.kill(server.pid, signal.SIGKILL)
            for each in clients:
                each.cancel()
            await asyncio.gather(*clients, return_exceptions=True)

        with served(learns, threads=threads, killed=True) as server:
            asyncio.run(until_killed(server))
        before = snapshots(kept)
        with served(learns, threads=threads) as server:
            answers = asyncio.run(alone(server.port, asked))
        return {"before": before, "after": snapshots(kept), "said": [list(answer.said) for answer in answers]}


def snapshots(kept: Path) -> list[str]:
    """The names in a folder of snapshots that are whole."""
    found = kept.iterdir() if kept.is_dir() else ()
    return sorted(each.name for each in found if (each / "model.safetensors").is_file() and each.name[0] != ".")


def faults_of_kill(row: Row, expected: Sequence[Any]) -> list[str]:
    """What went wrong when a server that learns was killed, in sentences."""
    found = []
    if not row["before"]:
        found.append("the server that was killed had written no snapshot")
    elif not set(row["before"]) <= set(row["after"]):
        found.append(f"snapshots were lost: {row['before']} before the restart, {row['after']} after it")
    elif max(row["after"]) <= max(row["before"]):
        found.append("the server that was started again learnt nothing more")
    wrong = sum(one != other for one, other in zip(row["said"], expected, strict=True))
    if wrong:
        found.append(f"{wrong} answers were others after a kill")
    return found


def faults(row: Row) -> list[str]:
    """What the server did wrong under load, in sentences."""
    found = list(dict.fromkeys(row["errors"]))[:20]
    if row["left"] or row["running"]:
        found.append(f"{row['left']} requests are left that nobody waits for")
    if row["wrong_afterwards"]:
        found.append(f"afterwards {len(row['wrong_afterwards'])} answers were wrong: {row['wrong_afterwards'][0]}")
    found += [f"{name} is {value:g}" for name, value in row["served_errors"].items()]
    if not row["finished"]:
        found.append("no request was finished")
    if row["slope"] is not None and row["slope"] > ALLOWED_SLOPE:
        found.append(f"memory grows by {row['slope']:.2%} per 1,000 requests; {ALLOWED_SLOPE:.0%} is allowed")
    return found


def rate_row(server: Served, asked: Sequence[Mapping[str, Any]], concurrency: int, way: Way) -> Row:
    """Tokens per second of some requests, so many at once."""
    waiting = [{**each, **(way.asked or {})} for each in asked]

    async def run() -> int:
        made = 0

        async def client() -> None:
            nonlocal made
            while waiting:
                answer = await complete(server.port, waiting.pop())
                if answer.status != 200 or answer.error is not None:
                    raise RuntimeError(f"a request failed: {answer}")
                made += len(answer.tokens)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(client())
        return made

    began = time.perf_counter()
    tokens = asyncio.run(run())
    seconds = time.perf_counter() - began
    return {"way": way.name, "concurrency": concurrency, "tokens": tokens, "seconds": seconds}


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each level the default's speed over plain decoding: the median over rounds, and the extremes."""
    found = []
    for level in sorted({row["concurrency"] for row in rows}):
        rates = {
            (row["way"], row["round"]): row["tokens"] / row["seconds"] for row in rows if row["concurrency"] == level
        }
        rounds = sorted({round_ for way, round_ in rates if way == DEFAULT})
        ratios = [rates[DEFAULT, k] / rates[PLAIN, k] for k in rounds]
        found.append(
            {
                "concurrency": level,
                "default": statistics.median(rates[DEFAULT, k] for k in rounds),
                "plain": statistics.median(rates[PLAIN, k] for k in rounds),
                "ratio": statistics.median(ratios),
                "spread": [min(ratios), max(ratios)],
            }
        )
    return found


def findings(row: Row, kill: Row | None, entries: Sequence[dict[str, Any]]) -> Findings:
    """Tables and a sentence.

    Args:
        kill: The row of a server that was killed; None if none was.
    """
    wrong = faults(row) + ([] if kill is None else faults_of_kill(kill, row["said"]))
    growth = "not known from so few requests" if row["slope"] is None else f"{row['slope']:+.3%} per 1,000 requests"
    chaos = sum(row["chaos"].values())
    lines = [
        ["finished answers, each as alone", row["finished"]],
        ["their tokens", row["tokens"]],
        *[[f"clients: {name}", count] for name, count in row["chaos"].items()],
        ["growth of memory", growth],
        ["requests left at the end", row["left"]],
        *(
            []
            if kill is None
            else [["newest snapshot at a kill, and later", f"{kill['before'][-1:]} {kill['after'][-1:]}"]]
        ),
    ]
    tables = [Table(head=("under load", ""), lines=lines, title="Load")]
    if entries:
        head = ("requests at once", "default, tokens/s", "plain, tokens/s", "default over plain")
        cells = [
            [
                e["concurrency"],
                f"{e['default']:.1f}",
                f"{e['plain']:.1f}",
                f"{e['ratio']:.3f} [{e['spread'][0]:.3f}, {e['spread'][1]:.3f}]",
            ]
            for e in entries
        ]
        tables.append(Table(head=head, lines=cells, title="Rates"))
    least = min((e["ratio"] for e in entries), default=math.nan)
    text = (
        f"{row['finished']} answers beside {chaos} clients that misbehaved; memory: {growth}. "
        + ("Nothing went wrong. " if not wrong else f"What went wrong: {'; '.join(wrong)}. ")
        + (f"The default has at least {least:.3f} of plain decoding's rate (goal {ALLOWED_SPEED})." if entries else "")
    )
    summary = {"faults": wrong, "slope": row["slope"], "finished": row["finished"], "chaos": chaos, "rates": entries}
    return Findings(tables=tables, text=text, summary=summary)


def main(
    out: options.Out = None,
    minutes: Annotated[float, typer.Option(min=0.0, help="How long the load with chaos lasts.")] = 10.0,
    clients: Annotated[int, typer.Option(min=3, help="Clients at once; every third one misbehaves.")] = 64,
    distinct: Annotated[int, typer.Option(min=1, help="Different requests.")] = 96,
    levels: Annotated[str, typer.Option(help="Requests at once without chaos.")] = "1,2,4,8,16,32,64",
    requests: Annotated[int, typer.Option(min=1, help="Requests of one turn without chaos.")] = 64,
    rounds: options.Rounds = 3,
    plain: Annotated[str, typer.Option(help="Plain decoding in a `process` of its own, or by `request`.")] = "process",
    kills: Annotated[bool, typer.Option(help="Also kill a server that learns, and start it again.")] = True,
    dtype: options.Dtype = "float32",
    threads: options.Threads = 2,
) -> Mapping[str, Any]:
    """Load the server, with chaos and without. Exit status 1 if the server did anything wrong under load."""
    given = dict(locals())
    if plain not in ("process", "request"):
        raise InputError(f"--plain must be process or request, got {plain!r}")
    steps = Label.each(options.whole_numbers("--levels", levels), "{} at once")
    slots = max(clients, *(step.value for step in steps))
    common = ("--dtype", dtype, "--max-slots", str(slots), "--slow-client-seconds", str(SLOW_SECONDS))
    apart = Way(name=PLAIN, options=("--drafter", "none"))
    inside = Way(name=PLAIN, asked={"speculation": {"enabled": False}})
    ways = [Way(name=DEFAULT), apart if plain == "process" else inside]
    asked = requests_of(PROMPTS, max(distinct, requests))
    with folder(out, "serve_load", given) as place, ExitStack() as stack:
        servers: dict[str, Served] = {}

        def server_of(way: Way) -> Served:
            key = " ".join(way.options)
            if key not in servers:
                servers[key] = stack.enter_context(served((*common, *way.options), threads=threads))
            return servers[key]

        def loaded(turn: Turn[Way, Label]) -> Row:
            return load_row(server_of(turn.way), asked[:distinct], clients, 60 * minutes)

        def killed(turn: Turn[Way, Label]) -> Row:
            return killed_row(asked[:distinct], common, threads)

        def rated(turn: Turn[Way, Label]) -> Row:
            return rate_row(server_of(turn.way), asked[:requests], turn.job.value, turn.way)

        [row] = place.take("load", turns(ways[:1], Label.each([clients], "{} at once")), loaded)
        if steps:
            # Every shape of forward runs once before anything is timed.
            place.take("warm-up", turns(ways, steps[-1:]), rated)
        kill = None
        if kills:
            [kill] = place.take("kill", turns(ways[:1], Label.each([8], "{} at once")), killed)
        found = findings(row, kill, summarise(place.take("rates", turns(ways, steps, rounds=rounds), rated)))
        place.finish(found)
    summary = found.summary or {}
    if summary["faults"]:
        raise typer.Exit(1)
    return summary
