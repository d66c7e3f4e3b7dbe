"""Two sides of one step, one after the other on the clock of two devices, or at once in two threads."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from typing import TypeVar

import torch

from outrider.decoding.clock import Clock

Drafted = TypeVar("Drafted")
Read = TypeVar("Read")


def in_turn(
    draft: Callable[[], Drafted], read: Callable[[], Read], clock: Clock, device: torch.device
) -> tuple[Drafted, Read]:
    """Both sides one after the other, on the clock of two devices."""
    drafted = draft()
    clock.lap("drafter")
    found = read()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        clock.lap("target")
    clock.timing.overlap = min(clock.timing.drafter, clock.timing.target + clock.timing.rows)
    return drafted, found


def at_once(
    worker: ThreadPoolExecutor,
    draft: Callable[[], Drafted],
    read: Callable[[], Read],
    clock: Clock,
    device: torch.device,
) -> tuple[Drafted, Read]:
    """Both sides at once, the drafter's in the worker's thread and, on a GPU, in a stream of its own.

    Neither runs any more when this returns or raises, so that slots can be closed.
    """
    side = _stream(device) if device.type == "cuda" else None
    if side is not None:
        side.wait_stream(torch.cuda.current_stream(device))

    def beside() -> tuple[Drafted, float]:
        began = clock.now()
        with nullcontext() if side is None else torch.cuda.stream(side):
            drafted = draft()
        return drafted, clock.now() - began

    future = worker.submit(beside)
    try:
        found = read()
        wait([future])
    except BaseException as error:
        wait([future])
        if (other := future.exception()) is not None:
            error.add_note(f"the drafter failed beside it: {other!r}")
        raise
    drafted, seconds = future.result()
    if side is not None:
        torch.cuda.current_stream(device).wait_stream(side)
    clock.lap("rest")
    timing, waited = clock.timing, clock.timing.rest
    timing.drafter, timing.rest = seconds, max(0.0, waited - seconds)
    timing.overlap = max(0.0, seconds - waited)
    return drafted, found


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that drafters use on a device; one for all, because memory is cached by stream."""
    return torch.cuda.Stream(device)
