"""Draft lengths that no clock chooses: what a test asserts must not depend on how fast a machine was."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from outrider.lengths.experience import Experience

_RECALLED, _INIT = Experience.recalled, Experience.__init__


def stop() -> None:
    """From now on an engine chooses lengths by counts and a rough formula, and remembers no costs."""

    def init(experience: Experience, **options: Any) -> None:
        _INIT(experience, **{"clocked": False} | options)

    Experience.__init__ = init
    Experience.recalled = classmethod(lambda cls, key, forwards=None: cls())


@contextmanager
def running() -> Iterator[None]:
    """Within this context costs are learnt from seconds, and remembered, as users have it."""
    Experience.__init__, Experience.recalled = _INIT, _RECALLED
    try:
        yield
    finally:
        stop()
