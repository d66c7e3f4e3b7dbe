"""Server-sent events, and JSON as clients can read it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no", "connection": "keep-alive"}
BLANK, IDS = "\ue000\ue001\ue000", "\ue000\ue002\ue000"
"""Stand for the text and the token ids in a `Form`. Their characters are private ones of Unicode, which no name has."""
LEAST_LOOK = 0.05
"""Fewest seconds between two looks at a stream that is being written."""
BREAKS = {"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""Characters at which some clients end a line."""
_ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def dumps(content: Any) -> bytes:
    """A value as JSON in one line, however a client tells lines apart.

    Example:
        >>> dumps({"text": "a\\u2028b"})
        b'{"text":"a\\\\u2028b"}'
    """
    text = _ENCODE(content)
    for letter, escape in BREAKS.items():
        text = text.replace(letter, escape)
    return text.encode("utf-8", errors="replace")


class JsonResponse(JSONResponse):
    """A value as an answer."""

    render = staticmethod(dumps)


def event(value: Any, name: str | None = None) -> bytes:
    """One event with a JSON value."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + dumps(value) + b"\n\n"


def written(values: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Events in one write, each named after its type; no write without any."""
    return [b"".join(event(each, each["type"]) for each in values)] if values else []


class Form:
    """Events that differ in one text, and in token ids behind it. What is the same is written once.

    Args:
        blank: The event with `BLANK` where the text stands, once. `IDS` may stand once behind it.

    Example:
        >>> Form(event({"id": 7, "text": BLANK})).filled("a\\n")
        b'data: {"id":7,"text":"a\\\\n"}\\n\\n'
        >>> Form(event({"text": BLANK, "ids": IDS})).filled("a", [1, 2])
        b'data: {"text":"a","ids":[1,2]}\\n\\n'
    """

    def __init__(self, blank: bytes) -> None:
        self._before, rest = _split(blank, BLANK)
        self._after: bytes | None
        self._between, self._after = _split(rest, IDS) if dumps(IDS) in rest else (rest, None)

    def filled(self, text: str, tokens: Sequence[int] = ()) -> bytes:
        """The event with this text, and with these token ids if it has a place for them."""
        filled = self._before + dumps(text) + self._between
        if self._after is None:
            return filled
        return filled + b"[" + ",".join(map(str, tokens)).encode() + b"]" + self._after


def _split(whole: bytes, blank: str) -> tuple[bytes, bytes]:
    """What stands before and behind a blank. Raises ValueError if it does not stand there once."""
    before, *after = whole.split(dumps(blank))
    if len(after) != 1:
        raise ValueError(f"a blank must stand in the value once, got {len(after)} of them")
    return before, after[0]


class EventStream(StreamingResponse):
    """An answer of events.

    The answer starts with the first piece, so that an error before it has a status of its own; after `keep_alive`
    seconds it starts without one. Later, a comment is sent whenever no piece came for so long. When the client leaves,
    or does not read for `patience` seconds, `pieces` is closed.

    Args:
        pieces: What is sent, one write each.
        failed: The pieces that tell a client of an error behind the first piece.
        close: Called at the end, whether or not `pieces` was ever begun.
        keep_alive: Seconds.
        patience: Longest time of one write, in seconds.
        pulse: The comment.
    """

    def __init__(
        self,
        pieces: AsyncIterator[bytes],
        *,
        failed: Callable[[Exception], Sequence[bytes]],
        close: Callable[[], None],
        keep_alive: float,
        patience: float,
        pulse: bytes = KEEP_ALIVE,
    ) -> None:
        super().__init__(pieces, headers=HEADERS, media_type="text/event-stream")
        self._pieces = pieces
        self._failed = failed
        self._close = close
        self._keep_alive = keep_alive
        self._patience = patience
        self._pulse = pulse
        self._started = False
        self._lock = asyncio.Lock()
        self._sent = 0.0
        self._writing: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the pieces until they end or the client leaves."""
        self._sent = asyncio.get_running_loop().time()
        sending = asyncio.ensure_future(self._run(send))
        leaving = asyncio.ensure_future(gone(receive))
        watching = asyncio.ensure_future(self._watch(send, sending))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                scope["state"]["left"] = True
            elif not sending.cancelled():
                sending.result()
        finally:
            await cancelled(sending, leaving, watching)
            await _closed(self._pieces)
            self._close()

    async def _run(self, send: Send) -> None:
        """Send pieces as they come. No task and no timer is made for a piece: one task watches over all of them."""
        try:
            async for piece in self._pieces:
                await self._send(send, piece)
        except Exception as error:
            if not self._started:
                raise
            for piece in self._failed(error):
                await self._send(send, piece)
        await self._write(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _watch(self, send: Send, sending: asyncio.Future[None]) -> None:
        """Send a comment where nothing was sent for long, and give up a client that does not read."""
        loop = asyncio.get_running_loop()
        while True:
            writes = self._writing is not None
            due = self._patience + self._writing if self._writing is not None else self._sent + self._keep_alive
            left = due - loop.time()
            if left > 0:
                await asyncio.sleep(min(left, max(self._patience, LEAST_LOOK)))
                continue
            if not writes:
                try:
                    # `wait_for` may swallow the end of this task, if it comes just then.
                    async with asyncio.timeout(self._patience):
                        await self._send(send, self._pulse)
                    continue
                except TimeoutError:
                    pass
            sending.cancel()
            return

    async def _send(self, send: Send, piece: bytes) -> None:
        async with self._lock:
            if not self._started:
                self._started = True
                await self._write(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._write(send, {"type": "http.response.body", "body": piece, "more_body": True})

    async def _write(self, send: Send, message: Message) -> None:
        now = asyncio.get_running_loop().time
        self._writing = now()
        try:
            await send(message)
        finally:
            self._writing, self._sent = None, now()


async def gone(receive: Receive) -> None:
    """Return when the client has left. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait for their ends."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _closed(pieces: AsyncIterator[bytes]) -> None:
    closing = getattr(pieces, "aclose", None)
    if closing is not None:
        with contextlib.suppress(Exception):
            await closing()
