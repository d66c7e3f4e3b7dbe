"""Server-sent events, and JSON as clients can read it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no", "connection": "keep-alive"}
BREAKS = {"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""Characters at which some clients end a line."""


def dumps(value: Any) -> bytes:
    """A value as JSON in one line, however a client tells lines apart.

    Example:
        >>> dumps({"text": "a\\u2028b"})
        b'{"text":"a\\\\u2028b"}'
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for letter, escape in BREAKS.items():
        text = text.replace(letter, escape)
    return text.encode("utf-8", errors="replace")


def event(value: Any, name: str | None = None) -> bytes:
    """One event with a JSON value."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + dumps(value) + b"\n\n"


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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the pieces until they end or the client leaves."""
        sending = asyncio.ensure_future(self._run(send))
        leaving = asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            await _cancelled(sending, leaving)
            await _closed(self._pieces)
            self._close()

    async def _run(self, send: Send) -> None:
        """Send pieces as they come, and comments between them."""
        coming = asyncio.ensure_future(anext(self._pieces, None))
        try:
            while True:
                done, _ = await asyncio.wait((coming,), timeout=self._keep_alive)
                piece = coming.result() if done else self._pulse
                if piece is None:
                    break
                await self._send(send, piece)
                if done:
                    coming = asyncio.ensure_future(anext(self._pieces, None))
        except TimeoutError:
            # The client does not read.
            return
        except Exception as error:
            if not self._started:
                raise
            for piece in self._failed(error):
                await self._send(send, piece)
        finally:
            await _cancelled(coming)
        await self._write(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, piece: bytes) -> None:
        if not self._started:
            self._started = True
            await self._write(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await self._write(send, {"type": "http.response.body", "body": piece, "more_body": True})

    async def _write(self, send: Send, message: Message) -> None:
        await asyncio.wait_for(send(message), self._patience)


async def gone(receive: Receive) -> None:
    """Return when the client has left. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait for their ends."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _closed(pieces: AsyncIterator[bytes]) -> None:
    closing = getattr(pieces, "aclose", None)
    if closing is not None:
        with contextlib.suppress(Exception):
            await closing()
