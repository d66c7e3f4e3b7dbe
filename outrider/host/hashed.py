"""Hashes of files, kept between processes: a file is read again only when its size or its time has changed."""

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from outrider.host import remembered

RECORD = "hashes"
"""The kind of record that keeps hashes between processes."""
SETTLED = 2.0
"""Seconds after its last change from which a file's time tells it from later contents: file systems count coarsely."""

Stamp = tuple[str, int, int]
"""A file without symbolic links, its size in bytes, and when it was changed, in nanoseconds."""


def stamps_of(files: Sequence[Path]) -> tuple[Stamp, ...]:
    """What tells files from other ones without reading them.

    Raises:
        OSError: One of them is not there, or is no regular file.
    """
    entries = []
    for file in files:
        path = os.path.realpath(file)
        if not os.path.isfile(path):
            raise FileNotFoundError(f"{file} is no regular file")
        status = os.stat(path)
        entries.append((path, status.st_size, status.st_mtime_ns))
    return tuple(entries)


def hashes_of(files: Sequence[Path]) -> list[str]:
    """The SHA-256 of each file.

    Raises:
        OSError: One of them cannot be read.
    """
    return kept(stamps_of(files), "contents", lambda: [_read(file) for file in files])


def kept(stamps: Sequence[Stamp], what: str, make: Callable[[], list[str]]) -> list[str]:
    """Hashes that were made of these files before, or that are made now and kept.

    Nothing is kept of files that change meanwhile or have just changed.

    Args:
        stamps: The files when they were opened.
        what: What is hashed, and in which form: a part of the record's key.
        make: Makes the hashes.
    """
    key = {"files": [list(stamp) for stamp in stamps], "what": what}
    match remembered.read(RECORD, key):
        case {"hashes": list(hashes)} if all(isinstance(each, str) for each in hashes):
            return hashes
    hashes = make()
    newest = max((changed for _, _, changed in stamps), default=0)
    try:
        same = stamps_of([Path(path) for path, _, _ in stamps]) == tuple(stamps)
    except OSError:
        same = False
    if same and newest < time.time_ns() - SETTLED * 1e9:
        remembered.write(RECORD, key, {"hashes": hashes})
    return hashes


def _read(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
