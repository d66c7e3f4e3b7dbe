"""Errors as answers: in OpenAI's format, or in Anthropic's below its routes."""

import logging
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from outrider.core.inputs import InputError
from outrider.serve.api.bodies import ChatBody, CompletionBody
from outrider.serve.api.sse import JsonResponse
from outrider.serve.errors import ServeError

ANTHROPIC = "/v1/messages"
"""Routes whose errors have Anthropic's format."""
ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    529: "overloaded_error",
}
"""The type of an error by its status; of all others `api_error`."""
OVERLOADED = 529
"""Anthropic's status of a queue without room."""
FULL = ("queue_full", "too_many_tokens_queued", "overloaded")
"""Codes of a queue without room."""
FIELDS = frozenset(CompletionBody.model_fields) | frozenset(ChatBody.model_fields)
"""Fields of requests."""
log = logging.getLogger("outrider.serve")


def of_input(error: InputError) -> ServeError:
    """The engine's complaint about a request. The field that its sentence begins with is the one at fault."""
    words = str(error).split(maxsplit=2)
    first = words[1] if words[:1] == ["unknown"] and len(words) > 1 else words[0] if words else ""
    first = {"max_new_tokens": "max_tokens"}.get(first, first)
    return ServeError(400, str(error), param=first if first.partition(".")[0] in FIELDS else None)


def served(error: Exception) -> ServeError:
    """Any error as one of the server. One that nobody expected is logged, and says nothing of the inside."""
    if isinstance(error, ServeError):
        return error
    if isinstance(error, InputError):
        return of_input(error)
    log.error("a request failed", exc_info=error)
    return ServeError(500, "the server made a mistake; its log says more")


def openai_error(error: ServeError) -> dict[str, Any]:
    """An error as OpenAI's JSON."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def anthropic_error(error: ServeError, request_id: str) -> dict[str, Any]:
    """An error as Anthropic's JSON."""
    kind = ANTHROPIC_KINDS.get(anthropic_status(error), "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}


def anthropic_status(error: ServeError) -> int:
    """The status of an error; Anthropic has one of its own for a queue without room."""
    return OVERLOADED if error.code in FULL else error.status


def error_response(error: ServeError, scope: Scope) -> Response:
    """An error in the format of the routes that it is about."""
    path, state = scope["path"], scope["state"]
    state["code"] = error.code
    if path == ANTHROPIC or path.startswith(f"{ANTHROPIC}/"):
        return JsonResponse(anthropic_error(error, state["request_id"]), anthropic_status(error), error.headers)
    return JsonResponse(openai_error(error), error.status, error.headers)
