"""Where the seconds of one step go.

A GPU works behind the host: when the host has told it to run a forward, the forward has hardly begun. So on a GPU the
parts of a step lie between events in the device's own queue, and the events are read when somebody asks for a part.
Nothing waits for them in the loop.
"""

import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Protocol, cast, runtime_checkable

import torch

from outrider.core.types import Timing

Change = Callable[[Timing], None]
"""Something that becomes known of a timing."""


@runtime_checkable
class DeviceEvent(Protocol):
    """A place in a device's queue of work, such as a `torch.cuda.Event`."""

    def synchronize(self) -> None:
        """Wait until the device has come here."""
        ...

    def elapsed_time(self, end_event: "DeviceEvent") -> float:
        """Milliseconds from here to a later event."""
        ...


class StepClock:
    """Fills a Timing lap by lap, by the host's clock.

    Attributes:
        timing: The parts so far.

    Args:
        now: Seconds since some moment.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.timing = Timing()
        self.now = now
        self._began = self._last = now()

    @property
    def seconds(self) -> float:
        """Seconds of the host from the beginning to the last lap. Reading them never waits."""
        return self._last - self._began

    def lap(self, part: str) -> None:
        """Add to a part of the timing what has passed since the last lap."""
        before, self._last = self._last, self.now()
        setattr(self.timing, part, getattr(self.timing, part) + (self._last - before))

    def then(self, change: Change) -> None:
        """Change the timing, once all laps so far are known."""
        change(self.timing)


class EventClock(StepClock):
    """The same by events in a device's queue.

    Args:
        record: Puts an event behind all work that the device has been told to do.
    """

    def __init__(self, record: Callable[[], DeviceEvent], now: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(now)
        self.timing: LateTiming = LateTiming()
        self._record, self._event = record, record()

    def lap(self, part: str) -> None:
        self._last = self.now()
        before, self._event = self._event, self._record()
        self.then(partial(_add_between, part, before, self._event))

    def then(self, change: Change) -> None:
        self.timing.append(change)


class LateTiming(Timing):
    """A Timing that is computed when a part of it is first read. That waits for the device to finish the step."""

    def __init__(self) -> None:
        super().__init__()
        self._changes: list[Change] = []

    def append(self, change: Change) -> None:
        """Keep a change until a part is read."""
        self._changes.append(change)

    def __getattribute__(self, name: str) -> object:
        if name in _PARTS:
            # Changes read parts too, and must not find themselves in the list.
            changes, self._changes = self._changes, []
            for change in changes:
                change(self)
        return super().__getattribute__(name)


_PARTS = frozenset(field.name for field in fields(Timing))


def clock_on(device: torch.device, now: Callable[[], float] = time.perf_counter) -> StepClock:
    """The clock for work on a device: by events on a GPU, otherwise by the host's clock."""
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return StepClock(now)
    return EventClock(partial(_recorded, device), now)


def _recorded(device: torch.device) -> DeviceEvent:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return cast(DeviceEvent, event)


def _add_between(part: str, began: DeviceEvent, ended: DeviceEvent, timing: Timing) -> None:
    ended.synchronize()
    setattr(timing, part, getattr(timing, part) + began.elapsed_time(ended) / 1000)
