"""Drafting and verifying of one step, in two threads at once, or in turn with the time of two devices."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from typing import TypeVar

import torch

from outrider.core.types import Timing
from outrider.decoding.clock import StepClock, clock_on

Drafted = TypeVar("Drafted")
Read = TypeVar("Read")


def in_turn(draft: Callable[[], Drafted], read: Callable[[], Read], clock: StepClock) -> tuple[Drafted, Read]:
    """Run drafting and verifying in turn; `Timing.overlap` says how much two devices would have saved."""
    drafted = draft()
    clock.lap("drafter")
    reading = read()
    clock.then(_two_devices)
    return drafted, reading


def at_once(
    worker: ThreadPoolExecutor,
    draft: Callable[[], Drafted],
    read: Callable[[], Read],
    clock: StepClock,
    device: torch.device,
) -> tuple[Drafted, Read]:
    """Run drafting and verifying at once: drafting in the worker's thread and, on a GPU, in its own stream.

    Both have ended when this returns or raises, so that slots can be closed.
    """
    side = _stream(device) if device.type == "cuda" else None
    if side is not None:
        side.wait_stream(torch.cuda.current_stream(device))

    def drafting() -> tuple[Drafted, Timing]:
        with nullcontext() if side is None else torch.cuda.stream(side):
            worker_clock = clock_on(device, clock.now)
            drafted = draft()
            worker_clock.lap("drafter")
        return drafted, worker_clock.timing

    future = worker.submit(drafting)
    try:
        reading = read()
        wait([future])
    except BaseException as error:
        wait([future])
        if (other := future.exception()) is not None:
            error.add_note(f"the drafter failed at the same time: {other!r}")
        raise
    drafted, beside = future.result()
    if side is not None:
        torch.cuda.current_stream(device).wait_stream(side)
    clock.lap("rest")
    clock.then(functools.partial(_one_machine, beside))
    return drafted, reading


def _two_devices(timing: Timing) -> None:
    """What two devices would have saved, where drafting and verifying ran in turn."""
    timing.overlap = min(timing.drafter, timing.target + timing.rows)


def _one_machine(beside: Timing, timing: Timing) -> None:
    """What was saved, where `timing.rest` is the wait for drafting, which `beside` has timed."""
    seconds, waited = beside.drafter, timing.rest
    timing.drafter, timing.rest = seconds, max(0.0, waited - seconds)
    timing.overlap = max(0.0, seconds - waited)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all drafters on a device. They share one, because torch caches memory per stream."""
    return torch.cuda.Stream(device)
