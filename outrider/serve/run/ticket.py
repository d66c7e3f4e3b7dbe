"""A job's end of the line on the event loop: its events, in order."""

import asyncio
import time
from collections.abc import Callable

from outrider.serve.failures import JobError, SlowClient
from outrider.serve.limits import Limits
from outrider.serve.run.job import StepOutput

OVERHEAD = 256
"""Bytes that an event takes on the wire besides its text, roughly."""


class Ticket:
    """The events of one job, for one reader on the event loop that submitted it.

    Iterating ends after the event whose update has an output. It raises JobError if the job ends without one: because
    of a deadline, a shutdown or an error of the engine.

    Attributes:
        id: The job.
        loop: The event loop of its reader.

    Args:
        on_cancel: Called once, with the id, when the reader wants no more.
    """

    def __init__(
        self, id: str, loop: asyncio.AbstractEventLoop, limits: Limits, on_cancel: Callable[[str], None]
    ) -> None:
        self.id = id
        self.loop = loop
        self._limits = limits
        self._on_cancel = on_cancel
        self._events: asyncio.Queue[StepOutput | JobError] = asyncio.Queue()
        self._unsent = 0
        self._slow_since: float | None = None
        self._cancelled = False
        self._over = False
        self._read = False

    def __aiter__(self) -> "Ticket":
        return self

    async def __anext__(self) -> StepOutput:
        if self._read:
            raise StopAsyncIteration
        found = await self._events.get()
        if isinstance(found, JobError):
            self._read = True
            raise found
        self._read = found.update.output is not None
        self._unsent -= _size(found)
        if self._unsent <= self._limits.unsent_bytes:
            self._slow_since = None
        return found

    def cancel(self) -> None:
        """End the job. Its slot is free within two steps, and its last event has an output that says `cancelled`."""
        if not self._cancelled and not self._over:
            self._cancelled = True
            self._on_cancel(self.id)

    def put(self, event: StepOutput | JobError) -> None:
        """Give the reader an event, or the error that ends the job. Called on the event loop alone."""
        if self._over:
            return
        if isinstance(event, JobError):
            self._over = True
        else:
            self._over = event.update.output is not None
            self._unsent += _size(event)
            if not self._over and self._is_slow():
                self.cancel()
                self.put(SlowClient())
                return
        self._events.put_nowait(event)

    def _is_slow(self) -> bool:
        """Whether the reader has left too much unread for too long."""
        if self._unsent <= self._limits.unsent_bytes:
            return False
        now = time.monotonic()
        if self._slow_since is None:
            self._slow_since = now
        return now - self._slow_since > self._limits.slow_client_seconds


def _size(event: StepOutput) -> int:
    return OVERHEAD + len(event.update.text.encode())
