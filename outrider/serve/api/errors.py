"""Errors in OpenAI's format."""

from collections.abc import Mapping
from typing import Any, NoReturn

from starlette.responses import Response

from outrider.core.inputs import InputError
from outrider.serve.api.bodies import ChatBody, CompletionBody
from outrider.serve.api.sse import dumps

KINDS = {401: "authentication_error", 404: "not_found_error", 405: "not_found_error", 408: "timeout_error"}
KINDS |= {429: "rate_limit_error"}
"""The type of an error by its status; of other statuses below 500 `invalid_request_error`, of others `server_error`."""
CODES = {400: "invalid_value", 401: "invalid_api_key", 404: "not_found", 405: "not_found", 408: "request_timeout"}
CODES |= {413: "request_too_large", 415: "unsupported_media_type", 429: "queue_full", 500: "internal_error"}
"""The code of an error by its status, where nothing more is known."""
FIELDS = frozenset(CompletionBody.model_fields) | frozenset(ChatBody.model_fields)
"""Fields of requests."""
LONGEST = 2000
"""Most characters of a message."""


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        message: What was given, what is allowed, what to do.
        param: The field of the request, with dots; None where it is no field's fault.
        headers: Headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= LONGEST else message[: LONGEST - 3] + "..."
        self.param = param
        self.code = code or CODES.get(status, "overloaded" if status == 503 else "invalid_value")
        self.kind = kind or KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The error as JSON."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The error as an answer."""
        return Response(dumps(self.body()), self.status, self.headers, "application/json")


def refuse(param: str | None, message: str, code: str = "invalid_value") -> NoReturn:
    """Raise the error for a field that cannot be followed."""
    raise ApiError(400, message, param=param, code=code)


def refuse_key(param: str, advice: str) -> NoReturn:
    """Raise the error for a key that would change the output and is not supported."""
    raise ApiError(400, f"{param} is not supported; {advice}", param=param, code="unsupported_parameter")


def of_input(error: InputError) -> ApiError:
    """The engine's complaint about a request. The field that its sentence begins with is the one at fault."""
    words = str(error).split(maxsplit=2)
    first = words[1] if words[:1] == ["unknown"] and len(words) > 1 else words[0] if words else ""
    first = {"max_new_tokens": "max_tokens"}.get(first, first)
    return ApiError(400, str(error), param=first if first.partition(".")[0] in FIELDS else None)
