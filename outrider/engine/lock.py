"""One thread at a time in the methods of an engine."""

import functools
import os
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from outrider.core.inputs import InputError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
PATIENCE = 1.0
"""Seconds after which a waiting thread looks whether the one that holds the lock is in its own process."""


class Lock:
    """A lock that its holder may take again. A fork copies it without the thread that holds it, and nobody would ever
    release the copy: the child gets an error instead.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process = os.getpid()

    def __enter__(self) -> None:
        while not self._lock.acquire(timeout=PATIENCE):
            if self._process != os.getpid():
                raise InputError(
                    "this process was forked while another thread ran the engine, so the engine's state is in the "
                    "middle of a step; make an engine in the new process, or start it with the method 'spawn'"
                )
        self._process = os.getpid()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def alone(method: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let one thread at a time run a method of the engine."""

    @functools.wraps(method)
    def locked(*args: Parameters.args, **named: Parameters.kwargs) -> Result:
        with args[0]._lock:  # type: ignore[attr-defined]
            return method(*args, **named)

    return locked
