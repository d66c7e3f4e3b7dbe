"""Functions of tests in processes of their own, where no shapes are checked.

They are forked from a process that has imported what they need, so that none of them takes seconds to start.
"""

import multiprocessing
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.world.preloaded"])
TIMEOUT = 900.0
"""Seconds after which a process that does not end is a failure."""


def started(function: Callable[..., object], *arguments: object, **environment: str) -> BaseProcess:
    """A process that runs a function of a module, with the environment of this process and more."""
    process = SERVER.Process(target=_run, args=({**os.environ, **environment}, function, arguments))
    process.start()
    return process


def statuses(*processes: BaseProcess) -> list[int]:
    """The exit statuses of processes, once they have ended."""
    for process in processes:
        process.join(TIMEOUT)
    found = [process.exitcode for process in processes]
    assert None not in found, "a process does not end"
    return [int(status) for status in found if status is not None]


def printed(function: Callable[..., object], *arguments: object, **environment: str) -> tuple[int, str, str]:
    """The exit status, the output and the error output of a function in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        [status] = statuses(started(_printing, str(out), str(err), function, arguments, **environment))
        return status, out.read_text(), err.read_text()


@contextmanager
def telling(function: Callable[..., object], *arguments: object) -> Iterator[tuple[BaseProcess, Connection]]:
    """A process that runs a function, whose first argument sends values, and where they are received. It is killed at
    the end.
    """
    receiver, sender = SERVER.Pipe(duplex=False)
    process = started(function, sender, *arguments)
    sender.close()
    try:
        yield process, receiver
    finally:
        process.kill()
        process.join(TIMEOUT)
        receiver.close()


def rank_environments(count: int) -> list[dict[str, str]]:
    """What `torchrun` tells each of some processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def _run(environment: Mapping[str, str], function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    function(*arguments)


def _printing(out: str, err: str, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    for path, stream in ((out, sys.stdout), (err, sys.stderr)):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    function(*arguments)
