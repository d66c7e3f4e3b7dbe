"""The app in front of a vLLM: keys, names and limits are ours, answers are vLLM's, as they come."""

import asyncio
import contextlib
import json
import logging
import tempfile
import time
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path

import httpx
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from outrider.core.inputs import InputError
from outrider.serve.answers import LEFT, as_api, json_response
from outrider.serve.answers_log import AnswersLog, opened_log
from outrider.serve.bodies import save, whole
from outrider.serve.calls import ClientGone, while_there
from outrider.serve.errors import ApiError, refuse
from outrider.serve.front import ADMIN, Front
from outrider.serve.keys import Keys
from outrider.serve.limits import Limits
from outrider.serve.settings import HttpSettings
from outrider.serve.sse import DONE, event
from outrider.serve.vllm.launch import GREEDY_ALONE, must_be_greedy
from outrider.serve.vllm.process import VllmProcess
from outrider.serve.vllm.weights import WeightRoutes

ROUTES = ("/v1", "/tokenize", "/detokenize", "/tokenizer_info", "/load", "/metrics")
"""What is passed on. vLLM has other routes that change it, and no key guards them."""
GENERATE = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
"""Routes that generate."""
NOT_PASSED = frozenset(
    {"host", "connection", "keep-alive", "transfer-encoding", "te", "upgrade", "content-length", "authorization"}
    | {"x-api-key", "x-request-id", "accept-encoding", "proxy-connection", "expect", "server", "date"}
)
"""Headers that belong to one connection, or that we write ourselves."""
MOST_WEIGHTS = 64 * 2**30
"""Longest file of weights."""
DEAD = "vLLM, to which this server passes requests on, has ended; the server's log says why. Start the server again"
log = logging.getLogger("outrider.serve")


class PassingService:
    """A vLLM as `run` of `serve/server` sees it.

    Attributes:
        process: vLLM's process, which is ready.
        in_flight: Requests that it has not answered to the end.
    """

    def __init__(self, process: VllmProcess, limits: Limits) -> None:
        self.process, self.limits = process, limits
        self.in_flight = 0
        self.weights = WeightRoutes(process.remote)
        self.renewing = asyncio.Lock()
        self._draining, self._told = False, False

    @property
    def state(self) -> str:
        """`ready`, `draining` or `engine_dead`."""
        if not self.process.alive:
            if not self._told and not self._draining:
                self._told = True
                log.error("vLLM has ended: %s", self.process.last_words())
            return "engine_dead"
        return "draining" if self._draining else "ready"

    def start(self) -> None:
        """Nothing to do: the process runs."""

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, and let running ones end, at the latest after so many seconds."""
        self._draining = True
        ends = time.monotonic() + seconds
        while self.in_flight and time.monotonic() < ends and self.process.alive:
            await asyncio.sleep(0.05)

    def close(self) -> None:
        """End vLLM."""
        self.process.stop()

    def check(self) -> None:
        """Raise ApiError where no request can be taken."""
        state = self.state
        if state == "engine_dead":
            raise ApiError(503, DEAD, code="engine_dead")
        if state == "draining":
            raise ApiError(503, "the server is ending; ask another one", code="draining")


def make_passing_app(service: PassingService, settings: HttpSettings) -> FastAPI:
    """The app in front of a vLLM."""
    passing = Passing(service, settings)
    app = FastAPI(
        title="Outrider",
        version=version("outrider"),
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        lifespan=passing.connected,
    )
    app.add_api_route("/health", passing.health, methods=["GET"])
    app.add_api_route("/ping", passing.health, methods=["GET", "POST"])
    app.add_api_route("/live", passing.live, methods=["GET"])
    app.add_api_route("/version", passing.version, methods=["GET"])
    app.add_api_route("/metrics", passing.metrics, methods=["GET"])
    app.add_api_route("/v1/admin/drafter/{drafter}/weights", passing.renew, methods=["PUT"])
    app.add_api_route("/{path:path}", passing.passed, methods=["GET", "POST", "DELETE", "PUT"])
    for kind in (ApiError, InputError):
        app.add_exception_handler(kind, _refused)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(ClientGone, _left)
    if settings.answers is not None:
        app.add_middleware(AnswersLog, file=opened_log(settings.answers), admin_key=settings.admin_key)
    if settings.origins:
        app.add_middleware(CORSMiddleware, allow_origins=settings.origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(
        Front,
        keys=Keys(settings.keys),
        guard_all=settings.guard_all,
        room=lambda: max(0, service.limits.max_queue - service.in_flight),
        observe=passing.answered,
    )
    return app


class Passing:
    """The routes, over one connection pool to vLLM."""

    def __init__(self, service: PassingService, settings: HttpSettings) -> None:
        self._service, self._settings = service, settings
        remote = service.process.remote
        self._own = {"authorization": f"Bearer {remote.key}"}
        self._client = httpx.AsyncClient(
            base_url=remote.url,
            timeout=httpx.Timeout(service.limits.request_timeout, connect=10),
            limits=httpx.Limits(max_connections=None),
            # No proxy of the environment stands between this machine and itself.
            trust_env=False,
        )
        registry = CollectorRegistry()
        self._registry = registry
        self._requests = Counter(
            "outrider:http_requests", "Requests by route and status.", ["route", "status"], registry=registry
        )
        Gauge("outrider:engine_up", "1 while vLLM runs.", registry=registry).set_function(
            lambda: float(service.process.alive)
        )
        Gauge("outrider:requests_in_flight", "Requests that vLLM has not answered.", registry=registry).set_function(
            lambda: float(service.in_flight)
        )

    @contextlib.asynccontextmanager
    async def connected(self, app: FastAPI) -> AsyncIterator[None]:
        """The life of the app, at whose end the connections to vLLM are closed."""
        async with self._client:
            yield

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Count an answer."""
        self._requests.labels(route, str(status)).inc()

    async def health(self) -> Response:
        """Whether requests are taken: by this server and by vLLM."""
        state = self._service.state
        if state == "ready":
            try:
                found = await self._client.get("/health", headers=self._own, timeout=5)
                state = "ready" if found.status_code == 200 else "engine_dead"
            except httpx.TransportError:
                state = "stalled" if self._service.process.alive else "engine_dead"
        return Response() if state == "ready" else json_response({"status": state}, 503)

    async def live(self) -> Response:
        """Whether the process answers."""
        return Response()

    async def version(self) -> Response:
        """The versions of Outrider and of what answers."""
        python = self._service.process.python
        return json_response(
            {"version": version("outrider"), "engine": python.package, "engine_version": python.version}
        )

    async def metrics(self) -> Response:
        """vLLM's numbers, and ours below `outrider:`."""
        theirs = b""
        if self._service.process.alive:
            try:
                theirs = (await self._client.get("/metrics", headers=self._own, timeout=10)).content
            except httpx.TransportError:
                log.warning("vLLM does not tell its numbers")
        ours = generate_latest(self._registry)
        return Response(theirs + ours, headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"})

    async def renew(self, request: Request) -> Response:
        """Give the drafter the weights in the body, a file of safetensors."""
        own, service = self._settings.admin_key, self._service
        if own is None or Keys((own,)).owner(request.headers) is None:
            raise ApiError(401, "this route needs the server's admin key", headers={"www-authenticate": "Bearer"})
        speculation, asked = service.process.launch.speculation, request.path_params["drafter"]
        if speculation is None or speculation.model is None:
            refuse("drafter", "this server drafts with nothing that has weights")
        if asked not in speculation.names:
            refuse("drafter", f"unknown drafter {asked[:100]!r}; available: {', '.join(speculation.names)}")
        service.check()
        with tempfile.TemporaryDirectory(prefix="weights-", dir=service.process.folder) as scratch:
            place = Path(scratch) / "model.safetensors"
            await save(request, place, MOST_WEIGHTS)
            async with service.renewing:
                await asyncio.to_thread(service.weights.renew, place)
        return json_response({"drafter": asked})

    async def passed(self, request: Request) -> Response:
        """Pass a request on, and its answer back as it comes."""
        path, service = request.url.path, self._service
        known = any(path == route or path.startswith(f"{route}/") for route in ROUTES)
        # No key was asked for below the routes of the operator, and dots lead out of there.
        if not known or path.startswith(ADMIN) or {".", ".."} & set(path.split("/")):
            raise ApiError(404, f"there is no such route: {request.method} {path[:200]}")
        service.check()
        headers = {name: value for name, value in request.headers.items() if name not in NOT_PASSED}
        headers |= self._own | {"x-request-id": request.state.request_id, "accept-encoding": "identity"}
        body = await whole(request, service.limits.max_body_bytes)
        if path in GENERATE and must_be_greedy(service.process.launch, service.process.python):
            _check_greedy(body)
        asked = self._client.build_request(
            request.method, path, params=request.query_params, headers=headers, content=body or None
        )
        service.in_flight += 1
        try:
            answer = await while_there(request, self._client.send(asked, stream=True))
        except httpx.TimeoutException as error:
            service.in_flight -= 1
            raise ApiError(408, "vLLM did not answer in time; raise --request-timeout") from error
        except httpx.TransportError as error:
            service.in_flight -= 1
            raise ApiError(503, DEAD, code="engine_dead") from error
        except BaseException:
            service.in_flight -= 1
            raise
        kept = {name: value for name, value in answer.headers.items() if name not in NOT_PASSED}
        if "content-length" in answer.headers:
            kept["content-length"] = answer.headers["content-length"]
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            kept |= {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(self._pieces(answer), answer.status_code, kept)

    async def _pieces(self, answer: httpx.Response) -> AsyncIterator[bytes]:
        """The bytes of an answer as they come. A stream that breaks ends with an error that clients can read."""
        try:
            async for piece in answer.aiter_raw():
                yield piece
        except httpx.TransportError:
            if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                raise
            yield event(ApiError(503, DEAD, code="engine_dead").body())
            yield DONE
        finally:
            self._service.in_flight -= 1
            await answer.aclose()


def _check_greedy(body: bytes) -> None:
    """Refuse a request above temperature 0. What is no JSON object is left to vLLM."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return
    if isinstance(asked, dict) and asked.get("temperature") != 0:
        refuse("temperature", f"{GREEDY_ALONE}; ask for temperature 0, or let the server run with --drafter none")


async def _refused(request: Request, error: Exception) -> Response:
    return as_api(error).response()


async def _no_route(request: Request, error: Exception) -> Response:
    return ApiError(404, f"there is no such route: {request.method} {request.url.path[:200]}").response()


async def _left(request: Request, error: Exception) -> Response:
    return Response(status_code=LEFT)
