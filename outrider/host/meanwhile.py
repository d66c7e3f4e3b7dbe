"""What a thread hands to other threads when it begins a forward, which needs Python's lock less than all else."""

import threading
from collections.abc import Callable


class _Given(threading.local):
    """What the calling thread has given."""

    call: Callable[[], None] | None = None


_given = _Given()


def hand_over_by(call: Callable[[], None] | None) -> None:
    """Call this whenever the calling thread begins a forward; None calls nothing."""
    _given.call = call


def hand_over() -> None:
    """The calling thread begins a forward. Whatever runs forwards says so, as late as it can."""
    if _given.call is not None:
        _given.call()
