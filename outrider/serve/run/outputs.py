"""One output: the task that asks for it, the ticket that brings its updates, and the typed deltas that they become."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from outrider.core.types import Request
from outrider.drafters.protocol import Drafter
from outrider.engine.generation import Generation
from outrider.engine.output import Output, Times, Update
from outrider.engine.text import Ending
from outrider.serve.errors import ServeError, SlowClient
from outrider.serve.limits import Limits
from outrider.serve.observe.record import OutputTally
from outrider.serve.run.parser import OutputReader, Piece, PlainReader

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
            if isinstance(update, Update):
                ticket._unsent += OVERHEAD + len(update.text.encode())
                if update.output is None and ticket._is_slow():
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


@dataclass(frozen=True, kw_only=True)
class OutputEnd:
    """How an output ended.

    Attributes:
        reason: `length` where it has its most tokens.
        stopped_by: The client's stop string or stop token that ended it; None for the model's own end tokens.
        called: Whether it has called a tool.
    """

    reason: Literal["stop", "length"]
    stopped_by: str | int | None
    called: bool


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What comes of one output at once.

    Attributes:
        pieces: New text, reasoning and tool calls, in their order; none where text is held back.
        tokens: New tokens.
        logprobs: Log-probability of each token, if asked for.
        top: Of the likeliest tokens at each place.
        first: Whether it is the first delta of its output.
        end: In the last delta of its output.
    """

    output: "OutputStream"
    pieces: Sequence[Piece]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    top: Sequence[Mapping[int, float]]
    first: bool
    end: OutputEnd | None = None

    @property
    def text(self) -> str:
        """The text of all pieces."""
        return "".join([piece.text for piece in self.pieces])

    def joined(self, later: "Delta") -> "Delta":
        """This delta and the next one of its output."""
        return replace(
            later,
            pieces=joined([*self.pieces, *later.pieces]),
            tokens=[*self.tokens, *later.tokens],
            logprobs=[*self.logprobs, *later.logprobs],
            top=[*self.top, *later.top],
            first=self.first,
        )


@dataclass(kw_only=True)
class OutputStream:
    """One output of a request; changes in place.

    Attributes:
        index: Its number in the answer.
        prompt: The number of its prompt.
        task: What was asked.
        reader: Tells reasoning, content and tool calls apart.
        raw: The text with special tokens, where the reader or the client wants it.
        interval: Deltas wait until they hold so many tokens. The first and the last one do not wait.
        tokens: All tokens so far.
        reasoning_tokens: How many of them are reasoning.
        called: Whether it has called a tool so far.
        times: When it was queued, got its slot and emitted tokens.
        output: The engine's result, once it has ended.
        end: How it ended; None before.
    """

    index: int
    prompt: int
    task: OutputTask
    reader: OutputReader = field(default_factory=PlainReader)
    raw: Ending | None = None
    interval: int = 1
    tokens: list[int] = field(default_factory=list)
    tally: OutputTally = field(default_factory=OutputTally)
    reasoning_tokens: int = 0
    called: bool = False
    times: Times | None = None
    output: Output | None = None
    end: OutputEnd | None = None
    _held: Delta | None = None
    _begun: bool = False

    @property
    def cached(self) -> int:
        """Prompt tokens that needed no prefill."""
        return 0 if self.output is None else self.output.reused_tokens

    @property
    def finish_reason(self) -> str:
        """Why it ended, for logs and spans."""
        return "abort" if self.end is None else self.end.reason

    def take(self, update: Update) -> Delta | None:
        """What an update brings; None while it waits for more. Raises ServeError if something else ended the output."""
        self.times = update.times if update.output is None else update.output.times
        self.tokens += update.tokens
        logprobs: Sequence[float] = ()
        top: Sequence[Mapping[int, float]] = ()
        if update.step is not None:
            self.tally.add(update.step)
            logprobs = (update.step.logprobs or ())[: len(update.tokens)]
            top = (update.step.top_logprobs or ({},) * len(logprobs))[: len(update.tokens)]
        if update.output is not None and update.output.finish_reason not in ("stop", "length"):
            raise ServeError(503, "the server ended this request", code="draining")
        self.output = update.output
        pieces = joined(self._read(update.tokens, update.text))
        self.called = self.called or any(piece.kind == "call" for piece in pieces)
        if self.output is not None:
            reason: Literal["stop", "length"] = "length" if self.output.finish_reason == "length" else "stop"
            self.end = OutputEnd(reason=reason, stopped_by=self._stopped_by(self.output), called=self.called)
        delta = Delta(
            output=self,
            pieces=pieces,
            tokens=update.tokens,
            logprobs=logprobs,
            top=top,
            first=not self._begun,
            end=self.end,
        )
        if self._held is not None:
            delta = self._held.joined(delta)
        waits = self._begun and self.end is None and len(delta.tokens) < self.interval
        self._begun, self._held = True, delta if waits else None
        return None if waits else delta

    def _read(self, tokens: Sequence[int], text: str) -> list[Piece]:
        """The pieces of new text."""
        if self.raw is None:
            pieces = list(self.reader.feed(text))
        else:
            pieces = []
            for token in self._visible(tokens):
                self.raw.keep((token,))
                pieces += self.reader.feed(self.raw.take())
                self.reasoning_tokens += self.reader.reasons
        if self.output is not None:
            if self.raw is not None:
                pieces += self.reader.feed(self.raw.finish())
            pieces += self.reader.end(cut=self.output.finish_reason == "length")
        return pieces

    def _visible(self, tokens: Sequence[int]) -> Sequence[int]:
        """The tokens without the one that ended the output, which is no text."""
        output = self.output
        ended = output is not None and output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
        return tokens[:-1] if ended and not self.task.options.include_stop else tokens

    def _stopped_by(self, output: Output) -> str | int | None:
        reason = output.stop_reason
        return None if isinstance(reason, int) and reason not in self.task.options.stop_token_ids else reason


async def merged(outputs: Sequence[OutputStream], tickets: Sequence[Ticket]) -> AsyncIterator[Delta]:
    """The deltas of several outputs, in the order in which they come."""
    # What the client has not read stays in the tickets, which watch over slow clients.
    coming: asyncio.Queue[Delta | Exception | None] = asyncio.Queue(maxsize=1)

    async def pump(output: OutputStream, ticket: Ticket) -> None:
        try:
            async for update in ticket:
                if (delta := output.take(update)) is not None:
                    await coming.put(delta)
            await coming.put(None)
        except Exception as error:
            await coming.put(error)

    pumps = [asyncio.ensure_future(pump(*each)) for each in zip(outputs, tickets, strict=True)]
    left = len(pumps)
    try:
        while left:
            delta = await coming.get()
            if isinstance(delta, Exception):
                raise delta
            if delta is None:
                left -= 1
            else:
                yield delta
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces, with neighbours of one kind as one piece.

    Example:
        >>> [piece.text for piece in joined([Piece(kind="content", text="a"), Piece(kind="content", text="b")])]
        ['ab']
    """
    merged: list[Piece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if last is not None and last.kind == piece.kind and piece.id is None and last.call == piece.call:
            merged[-1] = replace(last, text=last.text + piece.text)
        else:
            merged.append(piece)
    return merged
