"""Requests that run to their ends while each of their steps is watched."""

from collections.abc import Callable, Sequence

from outrider.core.deadline import ENDLESS, Deadline
from outrider.core.types import Request
from outrider.decoding.protocol import Watch
from outrider.engine.engine import Engine
from outrider.engine.output import Output, succeeded

LEAST_STEPS = 3
"""Fewest steps before a deadline counts: the first may only read prompts, and then something is drafted."""


def run_watched(
    engine: Engine,
    requests: Sequence[Request],
    watch: Watch,
    progress: Callable[[Output], None] | None = None,
    first: Sequence[Request] = (),
    until: Deadline = ENDLESS,
) -> list[Output]:
    """Run requests on an idle engine, as many at once as there are slots. Returns outputs in their order.

    Args:
        watch: Called with every step, in the place of the engine's own.
        progress: Called with each output as it ends.
        first: Requests that run to their ends before, and are watched too. The others may reuse their slots.
        until: Requests that have no end then are cancelled and not returned; a few steps are made at least.
    """
    outputs: dict[str, Output] = {}
    ids: list[str] = []
    num_steps = 0
    before, engine.watch = engine.watch, watch
    try:
        for some in (first, requests):
            ids += [engine.add(request) for request in some]
            num_steps = 0
            while len(outputs) < len(ids) and not (until.passed and num_steps >= LEAST_STEPS):
                num_steps += 1
                for update in map(succeeded, engine.step()):
                    if update.output is not None:
                        outputs[update.id] = update.output
                        if progress is not None:
                            progress(update.output)
    finally:
        engine.watch = before
        for id in ids:
            engine.cancel(id)
        engine.rest()
    return [outputs[id] for id in ids[len(first) :] if id in outputs]
