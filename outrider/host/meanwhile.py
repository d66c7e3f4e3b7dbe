"""What a thread hands to other threads when it begins a forward, which needs Python's lock less than all else."""

import threading
from collections.abc import Callable


class _HandOver(threading.local):
    """What the calling thread has given."""

    call: Callable[[], None] | None = None


_of_thread = _HandOver()


def hand_over_by(call: Callable[[], None] | None) -> None:
    """Call this whenever the calling thread begins a forward; None calls nothing."""
    _of_thread.call = call


def hand_over() -> None:
    """The calling thread begins a forward. Whatever runs forwards says so, as late as it can."""
    if _of_thread.call is not None:
        _of_thread.call()
