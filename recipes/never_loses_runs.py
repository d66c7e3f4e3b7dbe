"""Run by the recipe `never_loses` in a fresh process: defaults, plain decoding and fixed lengths in turn."""

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import outrider
from outrider.bench.evidence import Row
from outrider.bench.workload import PROMPTS, read_prompts
from outrider.core.types import Sampling
from outrider.engine.engine import Engine
from outrider.host import remembered
from outrider.lengths.fixed import FixedLength
from outrider.plan.table import RECORD as COSTS
from outrider.plan.table import measured

PLAIN, DEFAULT, CONTROL = "plain", "default", "plain, again"
"""`plain, again` runs what `plain` runs. What the two differ by is noise."""
LEARNT = (COSTS, "acceptance")
"""The kinds of records that a process with an empty cache must not see."""
PASSES = 6
"""How often each way has its turn. A machine is slower now and then, which must not fall on one way alone."""


@contextmanager
def records_in(place: str) -> Iterator[None]:
    """Keep costs and acceptance in another folder. Compiled forwards stay where they are."""
    read, write = remembered.read, remembered.write

    def at_place(function: Any) -> Any:
        def called(kind: str, *arguments: Any) -> Any:
            if kind not in LEARNT:
                return function(kind, *arguments)
            before = os.environ.get("OUTRIDER_CACHE")
            os.environ["OUTRIDER_CACHE"] = place
            try:
                return function(kind, *arguments)
            finally:
                if before is None:
                    del os.environ["OUTRIDER_CACHE"]
                else:
                    os.environ["OUTRIDER_CACHE"] = before

        return called

    remembered.read, remembered.write = at_place(read), at_place(write)
    try:
        yield
    finally:
        remembered.read, remembered.write = read, write


def timed(engine: Engine, prompts: Sequence[Sequence[int]], asked: Mapping[str, Any]) -> Row:
    """Answer prompts, as many at once as the job says, from a cold cache. All outputs are equally long."""
    engine.rest()
    running = asked["requests"]
    tokens = drafted = steps = 0
    began = time.perf_counter()
    for number in range(running):
        engine.add(
            list(prompts[(number + asked["round"]) % len(prompts)]),
            max_new_tokens=asked["max_new_tokens"],
            sampling=Sampling(temperature=asked["temperature"], seed=number if asked["seeded"] else None),
            ignore_eos=True,
        )
    while running:
        for update in engine.step():
            if update.output is not None:
                if update.output.error is not None:
                    raise update.output.error
                running -= 1
                tokens += len(update.output.tokens)
                drafted, steps = drafted + update.output.num_draft_tokens, steps + update.output.num_steps
    return {"seconds": time.perf_counter() - began, "tokens": tokens, "drafted": drafted, "steps": steps}


def run(asked: Mapping[str, Any]) -> Row:
    """All ways, some turns each, in random order. What is compiled or allocated at first was so before."""
    torch.set_num_threads(asked["threads"])
    options = {name: asked[name] for name in ("target", "drafter") if asked[name] is not None}
    options["max_slots"] = max(8, asked["requests"])
    began = time.perf_counter()
    default = outrider.load(**options)
    loading = time.perf_counter() - began
    costs = default.parts.experience.costs
    if asked["prepare"] and (costs is None or not costs.kept or len({row.length for row in costs.rows}) < 9):
        costs = measured(default.parts, max_slots=default.max_slots, thorough=True)
        return {"kept": costs is not None and costs.kept}
    engines = {PLAIN: default.plain(), CONTROL: default.plain()}
    fixed = outrider.load(**options, length="fixed:1")
    prompts = [default.encode(text) for _, _, text in read_prompts(PROMPTS)]
    for length in asked["lengths"]:
        engines[f"fixed:{length}"] = with_length(fixed, length)
    for engine in engines.values():
        timed(engine, prompts, {**asked, "max_new_tokens": 16})
    engines[DEFAULT] = default
    order, turns = random.Random(asked["round"]), {way: list[Row]() for way in engines}
    for turn in range(PASSES):
        for way in order.sample([*engines], len(engines)):
            # Plain decoding uses the slots of the default engine, which keeps some warm.
            default.rest()
            turns[way].append(timed(engines[way], prompts, {**asked, "round": asked["round"] + turn}))
    ways = {
        way: {name: sum(row[name] for row in rows) for name in rows[0]} | {"turns": [row["seconds"] for row in rows]}
        for way, rows in turns.items()
    }
    return {
        "loading": loading,
        "kept": costs is not None and costs.kept,
        "busy": costs is not None and costs.busy,
        "ways": ways,
    }


def with_length(engine: Engine, length: int) -> Engine:
    """The same models with another fixed length."""
    parts = replace(engine.parts, length=FixedLength(num_speculative_tokens=length))
    return Engine(parts, tokenizer=engine.tokenizer, max_slots=engine.max_slots, keep_warm=False)


def answer(text: str) -> None:
    """Do the job that a JSON text describes, and print its row."""
    asked = json.loads(text)
    with tempfile.TemporaryDirectory() as empty:
        place = empty if asked["state"] == "empty" else asked["kept"]
        Path(place).mkdir(parents=True, exist_ok=True)
        with records_in(place):
            print(json.dumps(run(asked)))


if __name__ == "__main__":
    answer(sys.argv[1])
