"""One output as it grows: the engine's updates become one stream of typed deltas."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from outrider.engine.output import Output, Times, Update
from outrider.engine.text import Ending
from outrider.serve.errors import ServeError
from outrider.serve.observe.record import OutputTally
from outrider.serve.run.parser import OutputReader, Piece, PlainReader
from outrider.serve.run.task import OutputTask, Ticket


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
