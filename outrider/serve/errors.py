"""Why a request gets no answer: one class of error, which knows its HTTP status and no HTTP library."""

from collections.abc import Mapping
from typing import NoReturn

KINDS = {401: "authentication_error", 404: "not_found_error", 405: "not_found_error", 408: "timeout_error"}
KINDS |= {429: "rate_limit_error"}
"""OpenAI's type of an error by its status; of other statuses below 500 `invalid_request_error`, of others
`server_error`."""
CODES = {400: "invalid_value", 401: "invalid_api_key", 404: "not_found", 405: "not_found", 408: "request_timeout"}
CODES |= {413: "request_too_large", 415: "unsupported_media_type", 429: "queue_full", 500: "internal_error"}
"""The code of an error by its status, where nothing more is known."""
LEFT = 499
"""Status of a request whose client has left; nobody reads it."""
LONGEST = 2000
"""Most characters of a message."""


class ServeError(Exception):
    """A request that is refused, or that ends without a result.

    Attributes:
        status: HTTP status.
        message: What was given, what is allowed, what to do.
        param: The field of the request, with dots; None where it is no field's fault.
        code: A short name of the reason.
        kind: OpenAI's type of error, such as `server_error`.
        retry_after: Seconds after which another try makes sense; None if that is not known.
        headers: Headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= LONGEST else message[: LONGEST - 3] + "..."
        self.param = param
        self.code = code or CODES.get(status, "overloaded" if status == 503 else "invalid_value")
        self.kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.retry_after = retry_after
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["retry-after"] = str(max(1, round(retry_after)))


class QueueFull(ServeError):
    """Too many requests, or too many tokens, wait already."""

    def __init__(self, message: str, *, code: str = "queue_full", retry_after: float | None = None) -> None:
        super().__init__(429, message, code=code, retry_after=retry_after)


class Draining(ServeError):
    """The server is stopping."""

    def __init__(self) -> None:
        message = "the server is shutting down and takes no more requests"
        super().__init__(503, message, code="draining", headers={"x-should-retry": "false"})


class EngineDead(ServeError):
    """The engine's thread has ended by an error.

    Args:
        status: 500 for a request that ran, 503 for a new one.
    """

    def __init__(self, *, status: int = 503) -> None:
        super().__init__(status, "the engine has stopped after an internal error", code="engine_dead")


class TimedOut(ServeError):
    """The deadline of the request passed."""

    def __init__(self) -> None:
        super().__init__(408, "the request ran out of time and was cancelled")


class SlowClient(ServeError):
    """The client left too much unread for too long."""

    def __init__(self) -> None:
        super().__init__(408, "the client read too slowly and its request was cancelled", code="slow_client")


def refuse(param: str | None, message: str, code: str = "invalid_value") -> NoReturn:
    """Raise the error for a field that cannot be followed."""
    raise ServeError(400, message, param=param, code=code)


def refuse_field(place: str, words: str) -> NoReturn:
    """Raise the error for a field that cannot be followed, which the message begins with."""
    refuse(place, f"{place}: {words}")


def refuse_key(param: str, advice: str) -> NoReturn:
    """Raise the error for a key that would change the output and is not supported."""
    refuse(param, f"{param} is not supported; {advice}", "unsupported_parameter")
