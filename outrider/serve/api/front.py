"""What every request passes first: its name, its key, the headers of its answer, and mistakes that nobody expected."""

import logging
import time
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.serve.api.errors import error_response
from outrider.serve.api.gateway import Gateway, request_id
from outrider.serve.errors import LEFT, ServeError
from outrider.serve.keys import Keys
from outrider.serve.observe.logs import note_request

GUARDED = "/v1"
ADMIN = "/v1/admin/"
"""Routes with a key of their own, which they look at themselves."""
log = logging.getLogger("outrider.serve")


class Front:
    """An ASGI middleware around the app of a gateway."""

    def __init__(self, app: ASGIApp, *, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway
        self._keys = Keys(gateway.settings.keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, headers, gateway = time.monotonic(), Headers(scope=scope), self._gateway
        id = request_id(headers.get("x-request-id"))
        state: dict[str, Any] = scope.setdefault("state", {})
        state |= {"request_id": id, "key": self._keys.owner(headers) if self._keys else None}
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                took = f"{1000 * (time.monotonic() - began):.1f}"
                sent = MutableHeaders(scope=message)
                sent["x-request-id"] = id
                sent["x-ratelimit-remaining-requests"] = str(gateway.service.slots.free)
                sent["openai-processing-ms"] = took
                sent["server-timing"] = f"total;dur={took}"
            await send(message)

        try:
            if self._is_guarded(scope) and state["key"] is None:
                wrong = ServeError(401, "the key is missing or wrong", headers={"www-authenticate": "Bearer"})
                await error_response(wrong, scope)(scope, receive, answer)
            else:
                await self._app(scope, receive, answer)
        except Exception:
            log.exception("request %s failed", id)
            if not status:
                mistake = ServeError(500, f"the server made a mistake; its log says more under {id}")
                await error_response(mistake, scope)(scope, receive, answer)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            seconds, status = time.monotonic() - began, LEFT if state.get("left") else status
            gateway.service.metrics.note_answer(route, status, seconds)
            line = {"id": id, "route": route, "status": status, "seconds": round(seconds, 6)}
            note_request(log, line | state.get("record", {}))
            # A request that ran has a span already.
            if gateway.traces is not None and status >= 400 and "record" not in state:
                code = state.get("code", "client_left" if status == LEFT else "internal_error")
                gateway.traces.add_refused(headers, id, scope["path"], status, code, seconds)

    def _is_guarded(self, scope: Scope) -> bool:
        path = scope["path"]
        inside = path == GUARDED or path.startswith(GUARDED + "/")
        if path.startswith(ADMIN):
            return False
        return bool(self._keys) and scope["method"] != "OPTIONS" and (self._gateway.settings.guard_all or inside)
