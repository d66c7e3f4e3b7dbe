"""One output to make: the task that a service is asked for, and the ticket by which a reader gets the updates."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.core.types import Request
from outrider.drafters.protocol import Drafter
from outrider.engine.generation import Generation
from outrider.engine.output import Update
from outrider.serve.errors import ServeError, SlowClient
from outrider.serve.limits import Limits

OVERHEAD = 256
"""Bytes that an update takes on the wire besides its text, roughly."""


@dataclass(frozen=True, kw_only=True)
class RequestSpeculation:
    """How the drafts of one request differ from those that the server was started for. None changes nothing.

    Attributes:
        enabled: False decodes the request plainly.
        max_tokens: Deepest draft of a step; 0 drafts nothing. What the length policy chooses stays below it.
        drafter: The name of a drafter of the server's list.
        verifier: The name of the server's verifier. All requests of a step share one, so another name is refused.
        tree: The name of the server's tree, likewise.
        max_context: Longest context, in tokens, behind which a token is drafted.
    """

    enabled: bool | None = None
    max_tokens: int | None = None
    drafter: str | None = None
    verifier: str | None = None
    tree: str | None = None
    max_context: int | None = None

    @property
    def off(self) -> bool:
        """Whether nothing is drafted."""
        return self.enabled is False or self.max_tokens == 0


@dataclass(frozen=True, kw_only=True)
class OutputTask:
    """One output to make.

    Attributes:
        id: A name that no running task has.
        prompt: Token ids.
        options: What is asked of the output.
        speculation: How its drafts differ from the server's.
        deadline: Seconds of `time.monotonic` after which the task is cancelled; by default the service's
            `request_timeout` from now.
        owner: The key that it came with, for `max_concurrent_per_key`, and because texts of other keys are not drafted;
            None counts for nobody.
    """

    id: str
    prompt: tuple[int, ...]
    options: Generation = field(default_factory=Generation)
    speculation: RequestSpeculation = field(default_factory=RequestSpeculation)
    deadline: float | None = None
    owner: str | None = None


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

    @staticmethod
    def put(updates: "Sequence[tuple[Ticket, Update | ServeError]]") -> None:
        """Give readers updates, or the errors that end their requests. Called on their event loop alone."""
        for ticket, update in updates:
            if ticket._over:
                continue
            if isinstance(update, Update) and update.output is None:
                ticket._unsent += OVERHEAD + len(update.text.encode())
                if ticket._is_slow():
                    ticket.cancel()
                    update = SlowClient()
            ticket._over = isinstance(update, ServeError) or update.output is not None
            ticket._updates.put_nowait(update)

    def _is_slow(self) -> bool:
        """Whether the reader has left too much unread for too long."""
        if self._unsent <= self._limits.unsent_bytes:
            return False
        now = time.monotonic()
        if self._slow_since is None:
            self._slow_since = now
        return now - self._slow_since > self._limits.slow_client_seconds
