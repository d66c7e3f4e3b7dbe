"""The process around the app: a socket, uvicorn, and what signals and a dead engine do."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI
from uvicorn.loops.auto import auto_loop_factory

from outrider.core.inputs import InputError
from outrider.serve.api.headers import bounded
from outrider.serve.run.service import Service

ENDING = (signal.SIGTERM, signal.SIGINT)
DEATH_SECONDS = 5.0
"""How long a server whose engine died still answers, so that clients and probes see why."""
LOOK_SECONDS = 0.25
"""How often the engine is looked at."""
CLOSING_SECONDS = 5
"""How long open connections may take to close after the last answer."""


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that keeps the port, and does not listen yet.

    Raises:
        InputError: The address is none of this machine, or the port is taken.
    """
    if not 0 <= port <= 65535:
        raise InputError(f"port must be 0 .. 65535 (0 takes a free one), got {port}")
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = places[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise InputError(
            f"the server cannot use port {port} of {host}: {error.strerror}; give another --port or --host"
        ) from error
    return bound


def url_of(bound: socket.socket) -> str:
    """Where the socket is reached, as a URL."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(
    app: FastAPI, service: Service, bound: socket.socket, ready: Callable[[], None], *, survives_death: bool = False
) -> int:
    """Serve until a signal ends the process. Returns the exit status.

    The first SIGTERM or SIGINT drains the service: new requests are refused, running ones may end. The second one
    cancels them. Both give status 0. A dead engine gives status 1.

    Args:
        ready: Called when the socket listens.
        survives_death: Whether it goes on answering when the engine has died.
    """
    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        return runner.run(_serve(app, service, bound, ready, survives_death))


async def _serve(
    app: FastAPI, service: Service, bound: socket.socket, ready: Callable[[], None], survives_death: bool
) -> int:
    limits = service.limits
    server = _Server(
        uvicorn.Config(
            app,
            http=bounded(limits.max_header_bytes, limits.header_seconds),
            log_level="warning",
            access_log=False,
            server_header=False,
            # Trusts no header that says where a request comes from.
            proxy_headers=False,
            h11_max_incomplete_event_size=limits.max_header_bytes,
            timeout_graceful_shutdown=CLOSING_SECONDS,
        )
    )
    server.ready = ready
    ending = _Ending(service, server, survives_death)
    loop = asyncio.get_running_loop()
    service.start()
    for each in ENDING:
        loop.add_signal_handler(each, ending.signalled)
    watching = asyncio.create_task(ending.watch())
    try:
        await server.serve(sockets=[bound])
    finally:
        watching.cancel()
        ending.cancel()
        for each in ENDING:
            loop.remove_signal_handler(each)
        await asyncio.to_thread(service.close)
        bound.close()
    return 1 if ending.died else 0


class _Server(uvicorn.Server):
    """uvicorn without its handling of signals, which would drop answers that are not finished."""

    ready: Callable[[], None]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self.ready()


class _Ending:
    """What ends the server. Lives on the event loop."""

    def __init__(self, service: Service, server: uvicorn.Server, survives_death: bool) -> None:
        self._service = service
        self._server = server
        self._survives_death = survives_death
        self._tasks: list[asyncio.Task[None]] = []
        self.died = False

    def signalled(self) -> None:
        """Drain at the first signal; give no more time at the next ones."""
        seconds = 0.0 if self._tasks else self._service.limits.drain_seconds
        self._tasks.append(asyncio.get_running_loop().create_task(self._drain(seconds)))

    async def _drain(self, seconds: float) -> None:
        await self._service.drain(seconds)
        self._server.should_exit = True

    async def watch(self) -> None:
        """End the server some seconds after the engine has died."""
        while self._service.state != "engine_dead":
            await asyncio.sleep(LOOK_SECONDS)
        if not self._survives_death:
            self.died = True
            await asyncio.sleep(DEATH_SECONDS)
            self._server.should_exit = True

    def cancel(self) -> None:
        """Leave nothing behind on the loop."""
        for task in self._tasks:
            task.cancel()
