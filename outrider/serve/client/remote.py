"""A server with OpenAI's API, seen from a client."""

import http.client
import json
import os
import socket
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from outrider.core.inputs import InputError, shown

TIMEOUT = 600.0
"""Longest wait for the next bytes, in seconds."""
DONE = "[DONE]"


STRANGE = "is it a server with OpenAI's API?"


class RemoteError(InputError):
    """The server refused a request, or did not answer.

    Attributes:
        status: Of its answer; None without one.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@contextmanager
def understood(what: str) -> Iterator[None]:
    """Read an answer of a server. One that has another form becomes a sentence.

    Raises:
        RemoteError: A field is missing, or is of another kind.
    """
    try:
        yield
    except InputError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise RemoteError(f"{what} answered in another form than OpenAI's API has; {STRANGE}") from error


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A server. Every request has a connection of its own, so that threads may share this value.

    Attributes:
        url: Such as http://127.0.0.1:8000, with or without /v1 at its end.
        key: Sent with every request; None sends none.

    Raises:
        InputError: The URL is none.
    """

    url: str
    key: str | None = None
    timeout: float = TIMEOUT

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            fine = False
        if not fine:
            raise InputError(f"url must be like http://127.0.0.1:8000, got {shown(self.url)}")
        object.__setattr__(self, "url", self.url.rstrip("/").removesuffix("/v1"))

    def get(self, path: str) -> Any:
        """The JSON at a path."""
        with self._answer("GET", path, None) as answer:
            return _value(answer.read())

    def text(self, path: str) -> str:
        """The text at a path."""
        with self._answer("GET", path, None) as answer:
            return answer.read().decode("utf-8", errors="replace")

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that answers a body."""
        with self._answer("POST", path, body) as answer:
            return _value(answer.read())

    def put(self, path: str, file: Path) -> Any:
        """The JSON that answers the bytes of a file."""
        with file.open("rb") as content, self._answer("PUT", path, content) as answer:
            return _value(answer.read())

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[Any, None, None]:
        """The objects of a stream of events. Leaving the loop early closes the connection.

        Raises:
            RemoteError: The request is refused, or the server ends it with an error.
        """
        with self._answer("POST", path, {**body, "stream": True}) as answer:
            for line in answer:
                text = line.decode("utf-8", errors="replace").strip()
                if not text.startswith("data:"):
                    continue
                data = text.removeprefix("data:").strip()
                if data == DONE:
                    return
                value = _value(data)
                if not isinstance(value, Mapping):
                    raise RemoteError(f"{self.url}{path} streamed {shown(value)}; {STRANGE}")
                if value.get("error"):
                    raise RemoteError(f"the server ended the request: {_message(value)}")
                yield value
        raise RemoteError(f"{self.url}{path} ended its answer in the middle; see whether the server still runs")

    def models(self) -> list[dict[str, Any]]:
        """The models that it serves."""
        with understood(f"{self.url}/v1/models"):
            cards: list[dict[str, Any]] = list(self.get("/v1/models")["data"])
            for card in cards:
                card["id"].encode()
        if not cards:
            raise RemoteError(f"{self.url} serves no model")
        return cards

    @contextmanager
    def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | BinaryIO | None
    ) -> Iterator[http.client.HTTPResponse]:
        """The answer to a request, if its status says that it is none of an error."""
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self.timeout)
        headers = {"Accept": "*/*"} | ({} if self.key is None else {"Authorization": f"Bearer {self.key}"})
        content: bytes | BinaryIO | None = None
        if isinstance(body, Mapping):
            headers["Content-Type"], content = "application/json", json.dumps(body).encode()
        elif body is not None:
            size = body.seek(0, os.SEEK_END)
            body.seek(0)
            headers |= {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
            content = body
        try:
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.request(method, parts.path + path, content, headers)
            answer = connection.getresponse()
            if answer.status >= 400:
                text = answer.read(100_000).decode("utf-8", errors="replace")
                raise RemoteError(f"{self.url}{path} answered {answer.status}: {_refusal(text)}", answer.status)
            yield answer
        except http.client.IncompleteRead as error:
            raise RemoteError(
                f"{self.url}{path} ended its answer in the middle; see whether the server still runs"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise RemoteError(f"{self.url}{path} does not answer: {reason}; see whether a server runs there") from error
        finally:
            connection.close()


def _value(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RemoteError(f"the server sent no JSON: {shown(text[:200])}") from error


def _refusal(text: str) -> str:
    """What an answer with an error says."""
    try:
        return _message(json.loads(text))
    except ValueError:
        return shown(text)


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, Mapping) else None
    message = error.get("message") if isinstance(error, Mapping) else error
    return str(message or body)
