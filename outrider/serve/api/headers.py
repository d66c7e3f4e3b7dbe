"""HTTP of requests whose headers end soon and are not too long, which uvicorn's fast parser does not see to itself."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

TOO_LONG, TOO_LATE = "The headers are too long.", "The headers took too long."
"""What a client is told."""


class Bounded(HttpToolsProtocol):
    """A connection that closes when headers pass a number of bytes, or of seconds.

    Attributes:
        most: Longest headers in bytes.
        seconds: How long a client may take to send them, from the opening of the connection or from their beginning.
    """

    most = 64 * 1024
    seconds = 30.0
    _reads_head = True
    _head = 0
    _alarm: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A new connection."""
        super().connection_made(transport)
        self._set_alarm()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        self._end_alarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse new bytes. Those of headers that are not complete count."""
        super().data_received(data)
        if self._reads_head:
            self._head += len(data)
            if self._head > self.most and not self.transport.is_closing():
                self.send_400_response(TOO_LONG)

    def on_message_begin(self) -> None:
        """A new request."""
        super().on_message_begin()
        self._reads_head, self._head = True, 0
        if self._alarm is None:
            self._set_alarm()

    def on_headers_complete(self) -> None:
        """The headers are whole. Raises ValueError, which the parser answers with 400, if they are too long."""
        self._reads_head, self._head = False, 0
        self._end_alarm()
        if sum([len(name) + len(value) + 4 for name, value in self.headers]) > self.most:
            raise ValueError(TOO_LONG)
        super().on_headers_complete()

    def _set_alarm(self) -> None:
        self._alarm = self.loop.call_later(self.seconds, self._late)

    def _end_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _late(self) -> None:
        if not self.transport.is_closing():
            self.send_400_response(TOO_LATE)


def bounded(most: int, seconds: float) -> type[Bounded]:
    """The protocol with these bounds, for uvicorn."""
    protocol: type[Any] = type("Bounded", (Bounded,), {"most": most, "seconds": seconds})
    return protocol
