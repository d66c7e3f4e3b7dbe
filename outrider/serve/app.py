"""The app: all routes over one service."""

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from outrider.core.inputs import InputError
from outrider.serve.api import admin, chat, completions, messages, models, responses
from outrider.serve.api.bodies import ChatBody, CompletionBody, DetokenizeBody, DrafterBody, TokenizeBody
from outrider.serve.api.errors import error_response, served
from outrider.serve.api.front import Front
from outrider.serve.api.gateway import Gateway
from outrider.serve.api.messages_body import CountRequest, MessagesRequest
from outrider.serve.api.openapi import describe
from outrider.serve.api.responses_body import ResponsesRequest
from outrider.serve.errors import LEFT, ServeError
from outrider.serve.observe.traces import Traces
from outrider.serve.page import routes as page
from outrider.serve.page.routes import PageBody
from outrider.serve.run.service import Service
from outrider.serve.settings import HttpSettings


def make_app(service: Service, settings: HttpSettings | None = None, traces: Traces | None = None) -> FastAPI:
    """The app of a service. The caller starts and closes the service.

    Args:
        traces: Where spans of requests go; None makes none.

    Raises:
        InputError: The response template cannot be used, or the log of answers cannot be written.
    """
    settings = settings or HttpSettings()
    gateway = Gateway.of(service, settings, traces)
    app = FastAPI(title="Outrider", version=gateway.version, docs_url=None, redoc_url=None)
    app.state.gateway = gateway
    for routes in (completions, chat, models, messages, responses, admin, page):
        app.include_router(routes.router)
    bodies: list[type[BaseModel]] = [CompletionBody, ChatBody, TokenizeBody, DetokenizeBody, DrafterBody]
    describe(app, [*bodies, MessagesRequest, CountRequest, ResponsesRequest, PageBody])
    for kind in (ServeError, InputError):
        app.add_exception_handler(kind, _refused)
    app.add_exception_handler(HTTPException, _not_found)
    app.add_exception_handler(ClientDisconnect, _left)
    if settings.origins:
        app.add_middleware(CORSMiddleware, allow_origins=settings.origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(Front, gateway=gateway)
    return app


async def _refused(request: Request, error: Exception) -> Response:
    return error_response(served(error), request.scope)


async def _left(request: Request, error: Exception) -> Response:
    return Response(status_code=LEFT)


async def _not_found(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    reason = "this route does not take this method" if status == 405 else "there is no such route"
    headers = dict(getattr(error, "headers", None) or {})
    message = f"{reason}: {request.method} {request.url.path[:200]}"
    return error_response(ServeError(status, message, headers=headers), request.scope)
