"""How routes answer: at once, or as a stream."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from outrider.core.inputs import InputError
from outrider.serve.api.calls import Call, ClientGone, while_there
from outrider.serve.api.errors import ApiError, of_input
from outrider.serve.api.gateway import Gateway
from outrider.serve.api.sse import DONE, EventStream, dumps, event
from outrider.serve.failures import JobError

log = logging.getLogger("outrider.serve")
LEFT = 499
"""Status of a request whose client has left; nobody reads it."""


def json_response(value: Any, status: int = 200) -> Response:
    """A value as an answer."""
    return Response(dumps(value), status, media_type="application/json")


async def answered(request: Request, call: Call, answer: Callable[[], Awaitable[Any]]) -> Response:
    """The whole answer. If the client leaves before, its outputs are cancelled."""
    try:
        return json_response(await while_there(request, answer()))
    except ClientGone:
        return Response(status_code=LEFT)
    finally:
        call.close()


def streamed(
    gateway: Gateway, call: Call, pieces: AsyncIterator[bytes], failed: Callable[[Exception], list[bytes]]
) -> Response:
    """The answer as a stream of events."""
    return EventStream(
        pieces,
        failed=failed,
        close=call.close,
        keep_alive=gateway.settings.keep_alive_seconds,
        patience=gateway.service.limits.slow_client_seconds,
    )


def failed(error: Exception) -> list[bytes]:
    """How a stream of OpenAI's routes tells of an error."""
    return [event(as_api(error).body()), DONE]


def as_api(error: Exception) -> ApiError:
    """Any error as an answer. One that nobody expected is logged, and says nothing of the inside."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, JobError):
        after = {} if error.retry_after is None else {"retry-after": str(max(1, round(error.retry_after)))}
        if error.code == "draining":
            after["x-should-retry"] = "false"
        return ApiError(error.status, error.message, code=error.code, kind=error.kind, headers=after)
    if isinstance(error, InputError):
        return of_input(error)
    log.error("a request failed", exc_info=error)
    return ApiError(500, "the server made a mistake; its log says more")
