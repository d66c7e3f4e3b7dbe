"""HTTP of requests whose headers have a longest length, which uvicorn's fast parser does not limit itself."""

from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

TOO_LONG = "The headers are too long."
"""What a client is told."""


def bounded(most: int) -> type[Any]:
    """uvicorn's protocol, which closes connections whose headers pass so many bytes.

    Where httptools is not installed it is the one of h11, which has a limit of its own
    (`h11_max_incomplete_event_size`).
    """
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return AutoHTTPProtocol

    class Bounded(HttpToolsProtocol):
        """Counts the bytes of headers as they come, so that a client which never ends them is not kept."""

        _reads_head = True
        _head = 0

        def data_received(self, data: bytes) -> None:
            """Parse new bytes. Those of a head that is not complete count."""
            super().data_received(data)
            if self._reads_head:
                self._head += len(data)
                if self._head > most and not self.transport.is_closing():
                    self.send_400_response(TOO_LONG)

        def on_message_begin(self) -> None:
            """A new request."""
            super().on_message_begin()
            self._reads_head, self._head = True, 0

        def on_headers_complete(self) -> None:
            """The headers are whole. Raises ValueError, which the parser answers with 400, if they are too long."""
            self._reads_head, self._head = False, 0
            if sum([len(name) + len(value) + 4 for name, value in self.headers]) > most:
                raise ValueError(TOO_LONG)
            super().on_headers_complete()

    return Bounded
