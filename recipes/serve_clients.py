"""Clients of a server: those that read their answers, and those that vanish, pause, or send garbage.

They speak HTTP over plain sockets, because no library sends what is wrong.
"""

import asyncio
import contextlib
import json
import random
import selectors
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PATIENCE = 120.0
"""Seconds after which a server that answers nothing counts as one that hangs."""
LARGE = 10_000_000
"""Bytes of a body that is too long."""
PAUSE = 3.0
"""Seconds for which a client does not read."""
LATE = (408, 413, 499)
"""Statuses, besides 400, that answer what a client did wrong."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a client read.

    Attributes:
        status: HTTP status; 0 if the connection closed before one came.
        tokens: Token ids of the output.
        text: Its text.
        reason: Why it ended; None if the answer did not get there.
        error: The error that the stream told.
        first: Seconds to the first event; None if none came.
        last: Seconds to the last event with tokens; None if none came.
        seconds: Seconds to the end.
        steps: Steps of the engine that the server tells of; None if it does not.
    """

    status: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    reason: str | None = None
    error: str | None = None
    first: float | None = None
    last: float | None = None
    seconds: float = 0.0
    steps: int | None = None

    @property
    def said(self) -> tuple[Any, ...]:
        """What must be the same whenever the same is asked."""
        return self.status, self.tokens, self.text, self.reason


@dataclass(kw_only=True)
class Wire:
    """A connection; changes in place."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def open(cls, port: int) -> "Wire":
        """A new connection. A small buffer makes a reader that pauses felt soon."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**16)
        return cls(reader=reader, writer=writer)

    async def ask(self, body: bytes, *, length: int | None = None) -> None:
        """Send a request.

        Args:
            length: What its header says of the body's length, if that is not true.
        """
        self.writer.write(head_of(len(body) if length is None else length) + body)
        await self.writer.drain()

    async def begin(self) -> int:
        """Read the head of the answer. Returns the status, 0 if the connection closed."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return 0
        return int(head.split(b" ", 2)[1])

    async def events(self) -> AsyncIterator[Mapping[str, Any]]:
        """The values of the stream's events as they come, without comments and the end."""
        left = b""
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            *whole, left = (left + (await self.reader.readexactly(size + 2))[:-2]).split(b"\n\n")
            for each in values(whole):
                yield each

    def close(self, *, abort: bool = False) -> None:
        """Leave; with `abort` without a farewell."""
        if abort:
            self.writer.transport.abort()
        else:
            self.writer.close()


def head_of(length: int) -> bytes:
    """The head of a request whose body has so many bytes."""
    return (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    ).encode()


def body_of(asked: Mapping[str, Any]) -> bytes:
    """A request for a stream with token ids, and with its metrics at the end."""
    more = {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    return json.dumps({**asked, **more}).encode()


def values(events: Sequence[bytes]) -> list[Mapping[str, Any]]:
    """The values of some events."""
    return [json.loads(each[6:]) for each in events if each.startswith(b"data: ") and each != b"data: [DONE]"]


async def complete(port: int, asked: Mapping[str, Any]) -> Answer:
    """Ask, and read to the end."""
    began, pieces = time.perf_counter(), list[tuple[float, bytes]]()
    wire = await Wire.open(port)
    try:
        await wire.ask(body_of(asked))
        while not pieces or pieces[-1][1]:
            piece = await wire.reader.read(2**16)
            pieces.append((time.perf_counter() - began, piece))
    finally:
        wire.close()
    return _read(pieces)


def answer_of(events: Sequence[tuple[float, Mapping[str, Any]]], seconds: float) -> Answer:
    """The answer that some events make, each with the seconds after which it came.

    Args:
        seconds: Seconds to the end.
    """
    first, last, steps = None, None, None
    tokens: list[int] = []
    text, reason, error = "", None, None
    for now, event in events:
        if "error" in event:
            error = str(event["error"])[:300]
        if event.get("choices"):
            first, last = now if first is None else first, now
        steps = ((event.get("metrics") or {}).get("outrider") or {}).get("steps", steps)
        for choice in event.get("choices", ()):
            tokens += choice.get("token_ids") or ()
            text += choice["text"]
            reason = choice["finish_reason"] or reason
    return Answer(
        status=200,
        tokens=tuple(tokens),
        text=text,
        reason=reason,
        error=error,
        first=first,
        last=last,
        seconds=seconds,
        steps=steps,
    )


def completed(port: int, asked: Sequence[Mapping[str, Any]]) -> list[Answer]:
    """Ask for several things at once, and read all answers to their ends. This process takes almost no time meanwhile:
    it notes when bytes come, and reads them when all are there.
    """
    pieces: list[list[tuple[float, bytes]]] = [[] for _ in asked]
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        found = stack.enter_context(selectors.DefaultSelector())
        for number, each in enumerate(asked):
            wire = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE))
            body = body_of(each)
            wire.sendall(head_of(len(body)) + body)
            found.register(wire, selectors.EVENT_READ, number)
        while found.get_map():
            ready = found.select(PATIENCE)
            if not ready:
                raise RuntimeError(f"nothing came for {PATIENCE:g} seconds")
            for key, _ in ready:
                piece = key.fileobj.recv(2**16)  # type: ignore[union-attr]
                pieces[key.data].append((time.perf_counter() - began, piece))
                if not piece:
                    found.unregister(key.fileobj)
    return [_read(each) for each in pieces]


def _read(pieces: Sequence[tuple[float, bytes]]) -> Answer:
    """The answer whose bytes came in these pieces; the last one is empty."""
    found: list[tuple[float, Mapping[str, Any]]] = []
    status, wire, body = 0, b"", b""
    for now, piece in pieces:
        wire += piece
        if not status and b"\r\n\r\n" in wire:
            head, wire = wire.split(b"\r\n\r\n", 1)
            status = int(head.split(b" ", 2)[1])
        while status == 200 and b"\r\n" in wire:
            size, rest = wire.split(b"\r\n", 1)
            length = int(size, 16)
            if len(rest) < length + 2:
                break
            body, wire = body + rest[:length], rest[length + 2 :]
        *whole, body = body.split(b"\n\n")
        found += [(now, each) for each in values(whole)]
    if status != 200:
        return Answer(status=status, error=wire.decode(errors="replace")[:300])
    return answer_of(found, pieces[-1][0])


Wrong = Callable[[int, Mapping[str, Any], random.Random], Awaitable[str | None]]
"""A client that does something wrong; returns what the server did wrong then, or None."""


async def vanishes(port: int, asked: Mapping[str, Any], dice: random.Random) -> str | None:
    """Leaves after some events."""
    wire = await Wire.open(port)
    try:
        await wire.ask(body_of({**asked, "max_tokens": 200, "ignore_eos": True}))
        left = dice.randrange(6)
        if left and (status := await wire.begin()) == 200:
            async for _ in wire.events():
                left -= 1
                if left <= 0:
                    break
            return None
        return None if not left else _wrong(status)
    finally:
        wire.close(abort=dice.random() < 0.5)


async def pauses(port: int, asked: Mapping[str, Any], dice: random.Random) -> str | None:
    """Reads the first event, does not read for a while, and then reads what is left."""
    wire = await Wire.open(port)
    try:
        await wire.ask(body_of({**asked, "max_tokens": 100, "logprobs": 20, "ignore_eos": True}))
        if (status := await wire.begin()) != 200:
            return _wrong(status)
        waited = False
        async for event in wire.events():
            if not waited:
                waited = True
                await asyncio.sleep(PAUSE * dice.random())
            if "error" in event and event["error"].get("code") not in ("slow_client", "request_timeout"):
                return f"an answer that was read slowly ended with {event['error']}"
        return None
    finally:
        wire.close()


async def half_closes(port: int, asked: Mapping[str, Any], dice: random.Random) -> str | None:
    """Closes its half of the connection, behind its request or in the middle of it."""
    wire = await Wire.open(port)
    try:
        body = body_of(asked)
        await wire.ask(body, length=len(body) + dice.choice((0, 10)))
        wire.writer.write_eof()
        status = await wire.begin()
        return None if status in (0, 200) else _wrong(status)
    finally:
        wire.close()


async def sends_garbage(port: int, asked: Mapping[str, Any], dice: random.Random) -> str | None:
    """Sends a body that is no JSON, too deep, or no UTF-8."""
    body = dice.choice(
        (
            b'{"prompt": "a", ',
            b"[" * 100_000,
            b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}",
            b'{"prompt": "\xff\xfe"}',
            b'{"prompt": "a", "max_tokens": ' + b"9" * 100_000 + b"}",
            b'{"prompt": "a", "temperature": NaN}',
            b"\x00" * 1000,
        )
    )
    wire = await Wire.open(port)
    try:
        await wire.ask(body)
        status = await wire.begin()
        return None if status == 400 else f"a body of garbage was answered with {status}"
    finally:
        wire.close()


async def sends_too_much(port: int, asked: Mapping[str, Any], dice: random.Random) -> str | None:
    """Sends a body of ten megabytes."""
    wire = await Wire.open(port)
    try:
        await wire.ask(b'{"prompt": "', length=LARGE)
        sent, status = 0, 0
        begun = asyncio.ensure_future(wire.begin())
        try:
            while sent < LARGE and not begun.done():
                wire.writer.write(b"a" * 65536)
                sent += 65536
                await wire.writer.drain()
            status = await begun
        except ConnectionError:
            # The server has answered and closed, as it may.
            return None
        finally:
            begun.cancel()
        return None if status in (0, 413) else f"a body of ten megabytes was answered with {status}"
    finally:
        wire.close()


WRONG: Mapping[str, Wrong] = {
    "vanishes": vanishes,
    "pauses": pauses,
    "half closes": half_closes,
    "sends garbage": sends_garbage,
    "sends too much": sends_too_much,
}
"""Ways to be a bad client."""


def _wrong(status: int) -> str | None:
    """What is wrong about the status of an answer to a client that misbehaves."""
    return None if status in (400, 429, *LATE) else f"a client that misbehaves was answered with {status}"


@dataclass(kw_only=True)
class Tally:
    """What happened under load; changes in place.

    Attributes:
        finished: Number of answers that were read to their ends.
        tokens: Their tokens.
        chaos: Number of bad clients, by what they did.
        errors: What the server did wrong.
        memory: The number of finished answers, and the server's memory in bytes then.
    """

    finished: int = 0
    tokens: int = 0
    chaos: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WRONG, 0))
    errors: list[str] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)


async def bad_client(port: int, asked: Mapping[str, Any], dice: random.Random, tally: Tally) -> None:
    """One client that misbehaves."""
    name = dice.choice(tuple(WRONG))
    tally.chaos[name] += 1
    try:
        found = await asyncio.wait_for(WRONG[name](port, asked, dice), PATIENCE)
    except TimeoutError:
        found = f"nothing came for {PATIENCE:g} seconds"
    except (ConnectionError, asyncio.IncompleteReadError):
        # The server closed the connection, as it may.
        found = None
    if found is not None:
        tally.errors.append(f"{name}: {found}")


async def good_client(port: int, asked: Mapping[str, Any], expected: Answer, tally: Tally) -> None:
    """One client that reads its answer, and compares it with the one that the same request got alone."""
    try:
        answer = await asyncio.wait_for(complete(port, asked), PATIENCE)
    except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
        tally.errors.append(f"an answer did not end: {type(error).__name__} {error}")
        return
    tally.finished += 1
    tally.tokens += len(answer.tokens)
    if answer.said != expected.said:
        tally.errors.append(f"{asked} got {answer} and alone {expected}")
