"""What every request passes first: its name, its key, the headers of its answer, and mistakes that nobody expected."""

import logging
import time
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.serve.errors import ApiError
from outrider.serve.ids import request_id
from outrider.serve.keys import Keys

Observe = Callable[[str, int, float], None]
"""Called with the route, the status and the seconds of each request."""
GUARDED = "/v1"
log = logging.getLogger("outrider.serve")


class Front:
    """An ASGI middleware.

    Args:
        guard_all: Whether all routes want a key, and not those under `/v1` alone.
        room: Returns how many more requests may wait.
    """

    def __init__(
        self, app: ASGIApp, *, keys: Keys, guard_all: bool, room: Callable[[], int], observe: Observe | None = None
    ) -> None:
        self._app = app
        self._keys = keys
        self._guard_all = guard_all
        self._room = room
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, headers = time.monotonic(), Headers(scope=scope)
        id = request_id(headers.get("x-request-id"))
        state: dict[str, Any] = scope.setdefault("state", {})
        state |= {"request_id": id, "key": self._keys.owner(headers) if self._keys else None}
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
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
                await wrong.response()(scope, receive, answer)
            else:
                await self._app(scope, receive, answer)
        except Exception:
            log.exception("request %s failed", id)
            if not status:
                mistake = ApiError(500, f"the server made a mistake; its log says more under {id}")
                await mistake.response()(scope, receive, answer)
        finally:
            if self._observe is not None:
                route = getattr(scope.get("route"), "path", "other")
                self._observe(route, status, time.monotonic() - began)

    def _is_guarded(self, scope: Scope) -> bool:
        path = scope["path"]
        inside = path == GUARDED or path.startswith(GUARDED + "/")
        return bool(self._keys) and scope["method"] != "OPTIONS" and (self._guard_all or inside)
