"""One thread at a time in the methods of an engine."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")


def alone(method: Callable[Given, Result]) -> Callable[Given, Result]:
    """Let one thread at a time run a method of the engine."""

    @functools.wraps(method)
    def locked(*args: Given.args, **named: Given.kwargs) -> Result:
        with args[0]._lock:  # type: ignore[attr-defined]
            return method(*args, **named)

    return locked
