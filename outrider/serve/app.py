"""The app: all routes over one service."""

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from outrider.core.inputs import InputError
from outrider.serve.api import admin, chat, completions, messages, models, responses
from outrider.serve.api.answers import LEFT, as_api
from outrider.serve.api.bodies import ChatBody, CompletionBody, DetokenizeBody, DrafterBody, TokenizeBody
from outrider.serve.api.calls import ClientGone
from outrider.serve.api.errors import ApiError
from outrider.serve.api.front import Front, is_anthropics
from outrider.serve.api.gateway import Gateway
from outrider.serve.api.messages_body import CountRequest, MessagesRequest
from outrider.serve.api.openapi import describe
from outrider.serve.api.responses_body import ResponsesRequest
from outrider.serve.failures import JobError
from outrider.serve.keys import Keys
from outrider.serve.observe import prometheus
from outrider.serve.observe.answers_log import AnswersLog, opened_log
from outrider.serve.observe.prometheus import Metrics
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
        InputError: A response template that cannot be used.
    """
    settings = settings or HttpSettings()
    gateway = Gateway.of(service, settings, traces)
    app = FastAPI(title="Outrider", version=gateway.version, docs_url=None, redoc_url=None)
    app.state.gateway = gateway
    app.state.metrics = Metrics(service, unread=lambda: gateway.counts["parse_failures"])
    for routes in (completions, chat, models, messages, responses, admin, prometheus, page):
        app.include_router(routes.router)
    bodies: list[type[BaseModel]] = [CompletionBody, ChatBody, TokenizeBody, DetokenizeBody, DrafterBody]
    describe(app, [*bodies, MessagesRequest, CountRequest, ResponsesRequest, PageBody])
    for kind in (ApiError, JobError, InputError):
        app.add_exception_handler(kind, _refused)
    app.add_exception_handler(HTTPException, _not_found)
    app.add_exception_handler(ClientGone, _left)
    if settings.answers is not None:
        app.add_middleware(AnswersLog, file=opened_log(settings.answers), admin_key=settings.admin_key)
    if settings.origins:
        app.add_middleware(CORSMiddleware, allow_origins=settings.origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(
        Front,
        keys=Keys(settings.keys),
        guard_all=settings.guard_all,
        room=lambda: service.places.free,
        observe=app.state.metrics.answered,
        traces=traces,
    )
    return app


async def _refused(request: Request, error: Exception) -> Response:
    return _shaped(request, as_api(error))


async def _left(request: Request, error: Exception) -> Response:
    return Response(status_code=LEFT)


async def _not_found(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    said = "this route does not take this method" if status == 405 else "there is no such route"
    headers = dict(getattr(error, "headers", None) or {})
    return _shaped(request, ApiError(status, f"{said}: {request.method} {request.url.path[:200]}", headers=headers))


def _shaped(request: Request, error: ApiError) -> Response:
    """An error in the format of the routes that it is about."""
    request.scope["state"]["code"] = error.code
    return messages.error_response(error, request) if is_anthropics(request.url.path) else error.response()
