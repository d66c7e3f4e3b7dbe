"""A real server over the pair that ships with the package."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.loops.auto import auto_loop_factory

import outrider
from outrider import Engine
from outrider.serve.api.headers import bounded
from outrider.serve.app import make_app
from outrider.serve.limits import Limits
from outrider.serve.observe.traces import Traces
from outrider.serve.run.renewal import Renewal
from outrider.serve.run.service import Service
from outrider.serve.settings import HttpSettings

NAME = "pair"


def loaded(**options: Any) -> Engine:
    """An engine. Each server needs one of its own."""
    return outrider.load(dtype="float32", probe=False, **options)


@contextlib.contextmanager
def serving(
    engine: Engine,
    settings: HttpSettings | None = None,
    limits: Limits | None = None,
    renewal: Renewal | None = None,
    drafter: str | None = None,
    traces: Traces | None = None,
) -> Iterator[str]:
    """The address of a server that ends with the block."""
    names, limits = (NAME, "other-name"), limits or Limits()
    service = Service(engine, names=names, limits=limits, renewal=renewal, drafter=drafter)
    with listening(make_app(service, settings, traces), service, limits) as url:
        yield url


@contextlib.contextmanager
def listening(app: FastAPI, service: Service, limits: Limits | None = None) -> Iterator[str]:
    """The address of an app over a service, which both end with the block."""
    ready, ending = threading.Event(), threading.Event()
    found: list[str] = []

    async def run() -> None:
        most = limits or Limits()
        http = bounded(most.max_header_bytes, most.header_seconds)
        server = uvicorn.Server(uvicorn.Config(app, port=0, http=http, log_level="error", ws="none"))
        service.start()
        try:
            serving = asyncio.ensure_future(server.serve())
            while not server.started and not serving.done():
                await asyncio.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            found.append(f"http://127.0.0.1:{port}")
            ready.set()
            while not ending.is_set():
                await asyncio.sleep(0.02)
            server.should_exit = True
            await serving
        finally:
            ready.set()
            service.close()

    def serve() -> None:
        with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
            runner.run(run())

    thread = threading.Thread(target=serve)
    thread.start()
    ready.wait()
    try:
        yield found[0]
    finally:
        ending.set()
        thread.join()
