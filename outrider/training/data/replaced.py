"""Files that are replaced as a whole: a reader sees the old file or the new one, never a part."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from outrider.core.types import InputError


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A temporary name beside a file. It takes the file's name when the body ends, and is removed if the body fails.

    Raises:
        InputError: The file cannot be written, for example because the disk is full.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replaced(Path(folder) / "said.txt") as fresh:
        ...         _ = fresh.write_text("the sea")
        ...     os.listdir(folder)
        ['said.txt']
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with written(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield fresh
            fresh.replace(path)
        finally:
            fresh.unlink(missing_ok=True)


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Turn errors of the file system in the body into one sentence about the file.

    Raises:
        InputError: The file cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from error
    except SafetensorError as error:
        raise InputError(f"{path} cannot be written: {_reason(error)}") from error


def _reason(error: SafetensorError) -> str:
    """What the system said, without the library's words around it."""
    said = str(error)
    return said.partition("I/O error: ")[2].partition(" (os error")[0] or said
