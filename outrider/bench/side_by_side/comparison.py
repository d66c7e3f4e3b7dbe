"""A session of one group: an engine that is loaded already, beside what drafts nothing on the same prompts."""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from outrider.bench.folder import Folder
from outrider.bench.side_by_side.arrivals import ClosedLoop
from outrider.bench.side_by_side.configuration import PLAIN, Configuration
from outrider.bench.side_by_side.player import Player
from outrider.bench.side_by_side.prompts import Encoder, ask
from outrider.bench.side_by_side.session import BenchPlan, Group, Measurement, SessionClock, under_load
from outrider.bench.side_by_side.verdict import of_way, units, verdict_of
from outrider.bench.side_by_side.ways import EngineWay, Way, transformers_way
from outrider.bench.speedup import rate
from outrider.bench.workloads.conversation import Conversation
from outrider.bench.workloads.workload import Workload
from outrider.core.inputs import InputError
from outrider.engine.engine import Engine
from outrider.engine.generation import Generation

COMMAND = "outrider generate --compare"
SPECULATIVE = "speculative"
"""The name of the engine that is compared."""


def compare(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    generation: Generation,
    *,
    rounds: int,
    time_limit: float | None = None,
) -> Measurement:
    """Answer all prompts in each turn: by the engine, by plain decoding, and by transformers' own `generate`.

    Plain decoding is also measured with padded forwards, where the target pads them. transformers takes part where one
    prompt runs after the other.

    Args:
        engine: It has passed the gate.
        prompts: Token ids.
        generation: What is asked of each request. An answer ends at the end of the context.
        rounds: How often everything is answered in every way.
        time_limit: Seconds after which no new round begins; the first one is always whole.
    """
    target: Any = engine.parts.target
    room, sampling = target.max_context, generation.sampling or engine.sampling
    generation = replace(generation, sampling=sampling)
    conversations = tuple(
        Conversation(
            id=str(i),
            category="",
            opening=tuple(prompt),
            output_tokens=min(generation.max_new_tokens, room - len(prompt)),
        )
        for i, prompt in enumerate(prompts)
    )
    alone = engine.max_slots == 1 or len(prompts) == 1
    load = ClosedLoop(concurrency=1 if alone else len(prompts))
    ways = ways_of(engine, generation, alone=alone)
    encoder = Encoder(engine.tokenizer, target.vocab_size)
    sha256 = hashlib.sha256(repr([each.opening for each in conversations]).encode()).hexdigest()
    workload = Workload(name="prompts", format="token ids", sha256=sha256, conversations=conversations)
    measurement = Measurement(
        plan=BenchPlan(
            configurations=(Configuration(name=SPECULATIVE, options={}),),
            generation=generation,
            num_prompts=None,
            loads=(load,),
            rounds=rounds,
            seed=sampling.seed or 0,
        ),
        target=type(target).__name__,
        workload=workload,
        asked=ask(workload, encoder, count=None, room=room),
        ways=[way.name for way in ways],
        drafting={SPECULATIVE},
        device=target.device,
    )
    player = Player(encoder=encoder, max_new_tokens=generation.max_new_tokens, room=room)
    place, group = Folder(None, COMMAND, {}), Group(number=0, conversations=conversations)
    until = None if time_limit is None else time.monotonic() + time_limit
    under_load(measurement, place, player, ways, load, [group], SessionClock(until=until))
    measurement.circumstances = place.circumstances
    return measurement


def ways_of(engine: Engine, generation: Generation, *, alone: bool) -> list[Way]:
    """The engine, and what drafts nothing on its target.

    Args:
        alone: Whether one prompt runs after the other.
    """
    target: Any = engine.parts.target
    # Turns of a conversation, and prompts that begin alike, are read as little anew as with drafts.
    plain = engine.plain(keep_warm=True)
    ways: list[Way] = [EngineWay(name=SPECULATIVE, engine=engine, generation=generation)]
    for columns in sorted({1, target.pad_to}):
        name = PLAIN if columns == 1 else f"{PLAIN}, {columns} columns"
        ways.append(EngineWay(name=name, engine=plain, generation=generation, drafts=False, columns=columns))
    if alone:
        ways.append(transformers_way("transformers generate", engine, generation))
    return ways


def figures(measurement: Measurement) -> dict[str, Any]:
    """The speedup over the fastest way that drafts nothing, its name, the rounds, and each way's tokens per second.

    Raises:
        InputError: Nothing was generated.
    """
    [load] = measurement.plan.loads
    verdict = verdict_of(measurement, SPECULATIVE, load.name)
    if verdict is None:
        raise InputError("nothing was generated that could be compared; give other prompts")
    rows = {way: units(of_way(measurement.rows, way, load.name)) for way in measurement.ways}
    rates = {way: rate(way_rows) for way, way_rows in rows.items() if way_rows}
    rounds = len({row["round"] for row in measurement.rows})
    return {"speedup": verdict.speedup.value, "plain": verdict.baseline, "rounds": rounds, "tokens_per_second": rates}
