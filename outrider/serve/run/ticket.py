"""A request of the engine on its way: who reads its updates, in order, on an event loop."""

import asyncio
import time
from collections.abc import Callable

from outrider.core.types import Request
from outrider.drafters.protocol import Drafter
from outrider.engine.output import Update
from outrider.serve.errors import ServeError, SlowClient
from outrider.serve.limits import Limits

OVERHEAD = 256
"""Bytes that an update takes on the wire besides its text, roughly."""


class Ticket:
    """The updates of one request, for one reader on the event loop that submitted it.

    Iterating ends after the update that has an output. It raises ServeError if the request ends without one: because
    of a deadline, a shutdown or an error of the engine.

    Attributes:
        id: The request's name.

    Args:
        request: What the engine gets.
        loop: The event loop of the reader.
        deadline: Seconds of `time.monotonic` after which the request is cancelled.
        drafter: Its drafter; None: that of the engine's parts.
        on_cancel: Called once, with the id, when the reader wants no more.
    """

    def __init__(
        self,
        request: Request,
        *,
        loop: asyncio.AbstractEventLoop,
        limits: Limits,
        deadline: float,
        drafter: Drafter | None,
        on_cancel: Callable[[str], None],
    ) -> None:
        self.id = request.id
        self.request = request
        self.loop = loop
        self.deadline = deadline
        self.drafter = drafter
        self._limits = limits
        self._on_cancel = on_cancel
        self._updates: asyncio.Queue[Update | ServeError] = asyncio.Queue()
        self._unsent = 0
        self._slow_since: float | None = None
        self._cancelled = False
        self._over = False
        self._read = False

    def __aiter__(self) -> "Ticket":
        return self

    async def __anext__(self) -> Update:
        if self._read:
            raise StopAsyncIteration
        update = await self._updates.get()
        if isinstance(update, ServeError):
            self._read = True
            raise update
        self._read = update.output is not None
        self._unsent -= OVERHEAD + len(update.text.encode())
        if self._unsent <= self._limits.unsent_bytes:
            self._slow_since = None
        return update

    def cancel(self) -> None:
        """End the request. Its slot is free within two steps, and the output of its last update is `cancelled`."""
        if not self._cancelled and not self._over:
            self._cancelled = True
            self._on_cancel(self.id)

    def put(self, update: Update | ServeError) -> None:
        """Give the reader an update, or the error that ends the request. Called on the event loop alone."""
        if self._over:
            return
        if isinstance(update, ServeError):
            self._over = True
        else:
            self._over = update.output is not None
            self._unsent += OVERHEAD + len(update.text.encode())
            if not self._over and self._is_slow():
                self.cancel()
                self.put(SlowClient())
                return
        self._updates.put_nowait(update)

    def _is_slow(self) -> bool:
        """Whether the reader has left too much unread for too long."""
        if self._unsent <= self._limits.unsent_bytes:
            return False
        now = time.monotonic()
        if self._slow_since is None:
            self._slow_since = now
        return now - self._slow_since > self._limits.slow_client_seconds
