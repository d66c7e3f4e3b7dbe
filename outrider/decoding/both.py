"""Drafting and verifying of one step, in two threads at once, or in turn with the time of two devices."""

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
    """Run drafting and verifying in turn; `Timing.overlap` says how much two devices would have saved."""
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
    """Run drafting and verifying at once: drafting in the worker's thread and, on a GPU, in its own stream.

    Both have ended when this returns or raises, so that slots can be closed.
    """
    side = _stream(device) if device.type == "cuda" else None
    if side is not None:
        side.wait_stream(torch.cuda.current_stream(device))

    def drafting() -> tuple[Drafted, float]:
        began = clock.now()
        with nullcontext() if side is None else torch.cuda.stream(side):
            drafted = draft()
        return drafted, clock.now() - began

    future = worker.submit(drafting)
    try:
        found = read()
        wait([future])
    except BaseException as error:
        wait([future])
        if (other := future.exception()) is not None:
            error.add_note(f"the drafter failed at the same time: {other!r}")
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
    """The stream of all drafters on a device. They share one, because torch caches memory per stream."""
    return torch.cuda.Stream(device)
