"""Where a command writes: nothing foreign is replaced, and one process writes at a time."""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from outrider.core.inputs import InputError

try:
    import fcntl
except ImportError:  # Windows has none.
    fcntl = None  # type: ignore[assignment]

_locks: set[Path] = set()
"""The locks that this process holds."""


def check_free(folder: Path) -> None:
    """Raise InputError unless a folder is empty or does not exist."""
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        raise InputError(f"{folder} exists already; give a new folder with --out, or remove it")


@contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """Hold a file, which may not exist yet, until the body ends; see `locked`. A device or a pipe is not held."""
    if path.exists() and not path.is_file():
        yield
        return
    file = path.resolve()
    with locked(file.with_name(f".{file.name}.lock"), path):
        yield


@contextmanager
def locked(lock: Path, place: Path) -> Iterator[None]:
    """Hold a place until the body ends, so that no other process writes there.

    The lock ends with its process, however that ends. A process may hold a place twice: threads are not told apart.
    Nothing is held on systems and file systems that have no such locks.

    Args:
        lock: A file that says who holds the place. It is deleted at the end, and so are the folders made for it if
            nothing else is in them.
        place: What is held, for messages.

    Raises:
        InputError: Another process holds the place, or the lock cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with locked_file(Path(folder) / "out.jsonl"):
        ...         held = os.listdir(folder)
        ...     held, os.listdir(folder)
        (['.out.jsonl.lock'], [])
    """
    lock = lock.parent.resolve() / lock.name
    if lock in _locks or fcntl is None:
        yield
        return
    fresh = [each for each in lock.parents if not each.exists()]
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _taken(lock, place)
    except OSError as error:
        raise InputError(
            f"{place} cannot be written, because its lock {lock} cannot be made: {error.strerror}; give another place"
        ) from error
    _locks.add(lock)
    try:
        yield
    finally:
        _locks.discard(lock)
        lock.unlink(missing_ok=True)
        os.close(descriptor)
        for each in fresh:
            # The others hold something.
            with suppress(OSError):
                each.rmdir()


def _taken(lock: Path, place: Path) -> int:
    """The descriptor of a lock that is now held."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read(descriptor)
            os.close(descriptor)
            raise InputError(
                f"{place} is being written by {holder}; wait until that has ended, or give another place"
            ) from None
        except OSError:
            # This file system has no locks.
            pass
        # Whoever held it before may have deleted the file that was opened.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), lock.stat()):
                _write(descriptor)
                return descriptor
        os.close(descriptor)


def _write(descriptor: int) -> None:
    """Note that this process holds a lock."""
    note = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(note).encode(), 0)


def _read(descriptor: int) -> str:
    """Who holds a lock, in words."""
    try:
        note = json.loads(os.pread(descriptor, 1000, 0))
        return f"process {note['pid']} on {note['host']} since {note['since']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "another process"
