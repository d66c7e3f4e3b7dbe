"""What every request passes first: its name, its key, the headers of its answer, and mistakes that nobody expected."""

import logging
import time
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.serve.api.answers import LEFT
from outrider.serve.api.errors import ApiError
from outrider.serve.api.messages_writer import error_body
from outrider.serve.api.sse import dumps
from outrider.serve.ids import request_id
from outrider.serve.keys import Keys
from outrider.serve.observe.logs import note_request
from outrider.serve.observe.traces import Traces

Observe = Callable[[str, int, float], None]
"""Called with the route, the status and the seconds of each request."""
GUARDED = "/v1"
ADMIN = "/v1/admin/"
"""Routes with a key of their own, which they look at themselves."""
ANTHROPIC = "/v1/messages"
"""Routes whose errors have Anthropic's format."""
log = logging.getLogger("outrider.serve")


class Front:
    """An ASGI middleware.

    Args:
        guard_all: Whether all routes want a key, and not those under `/v1` alone.
        room: Returns how many more requests may wait.
        observe: Called at the end of each request. One whose client left has the status 499.
        traces: Where spans of refused requests go; None makes none.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Keys,
        guard_all: bool,
        room: Callable[[], int],
        observe: Observe,
        traces: Traces | None = None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._guard_all = guard_all
        self._room = room
        self._observe = observe
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, headers = time.monotonic(), Headers(scope=scope)
        id = request_id(headers.get("x-request-id"))
        state: dict[str, Any] = scope.setdefault("state", {})
        state |= {"request_id": id, "key": self._keys.owner(headers) if self._keys else None}
        status, ended, left = 0, False, False

        async def hear() -> Message:
            nonlocal left
            message = await receive()
            left = left or (message["type"] == "http.disconnect" and not ended)
            return message

        async def answer(message: Message) -> None:
            nonlocal status, ended
            ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            if message["type"] == "http.response.start":
                status = message["status"]
                took = f"{1000 * (time.monotonic() - began):.1f}"
                own = MutableHeaders(scope=message)
                own["x-request-id"] = id
                own["x-ratelimit-remaining-requests"] = str(self._room())
                own["openai-processing-ms"] = took
                own["server-timing"] = f"total;dur={took}"
            await send(message)

        try:
            if self._is_guarded(scope) and state["key"] is None:
                wrong = ApiError(401, "the key is missing or wrong", headers={"www-authenticate": "Bearer"})
                state["code"] = wrong.code
                await _refusal(wrong, scope)(scope, hear, answer)
            else:
                await self._app(scope, hear, answer)
        except Exception:
            log.exception("request %s failed", id)
            if not status:
                mistake = ApiError(500, f"the server made a mistake; its log says more under {id}")
                await _refusal(mistake, scope)(scope, hear, answer)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            seconds, status = time.monotonic() - began, LEFT if left else status
            self._observe(route, status, seconds)
            told = {"id": id, "route": route, "status": status, "seconds": round(seconds, 6), **state.get("told", {})}
            note_request(log, told)
            # A request that ran has told of itself, and has a span.
            if self._traces is not None and status >= 400 and "told" not in state:
                code = state.get("code", "client_left" if left else "internal_error")
                self._traces.add_refused(headers, id, scope["path"], status, code, seconds)

    def _is_guarded(self, scope: Scope) -> bool:
        path = scope["path"]
        inside = path == GUARDED or path.startswith(GUARDED + "/")
        if path.startswith(ADMIN):
            return False
        return bool(self._keys) and scope["method"] != "OPTIONS" and (self._guard_all or inside)


def is_anthropics(path: str) -> bool:
    """Whether the errors of a path have Anthropic's format.

    Example:
        >>> is_anthropics("/v1/messages/count_tokens"), is_anthropics("/v1/messagesx")
        (True, False)
    """
    return path == ANTHROPIC or path.startswith(f"{ANTHROPIC}/")


def _refusal(error: ApiError, scope: Scope) -> Response:
    """An error in the format of the routes that it is about."""
    if not is_anthropics(scope["path"]):
        return error.response()
    return Response(
        dumps(error_body(error.status, error.message, scope["state"]["request_id"])),
        error.status,
        error.headers,
        "application/json",
    )
