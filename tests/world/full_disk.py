"""Writes that fail in the middle, as on a disk that is full."""

import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """Within this context no file grows beyond `size` bytes, what pytest itself writes to a file included.

    No module that is imported meanwhile is kept compiled: Python writes as much of it as fits, says nothing, and every
    later process would read a module that is cut off (python/cpython#126606).
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, ignored)
