"""Files that outlast a process: regular ones are read, whole ones are written, and who else may have written them."""

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from safetensors import SafetensorError

from outrider.core.inputs import InputError

UNFINISHED = ".unfinished"
"""What a temporary name ends with. A process that is killed leaves such a file or folder behind."""
WRITTEN_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def read(file: Path) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: It cannot be read, or is no regular file: a named pipe would wait for a writer.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} is no regular file")
    return file.read_bytes()


def replace(file: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Write a file whole, as `replaced` does.

    Args:
        mode: Its permissions, of which the umask takes some.

    Raises:
        OSError: It cannot be written. The old one is still there, and nothing else.
    """
    with replaced(file) as fresh, open(fresh, "xb", opener=partial(os.open, mode=mode)) as opened:
        opened.write(content)


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A temporary name beside a file or folder, which no other process and no other call uses.

    The body makes a file or a folder of that name. When the body ends, it is put in its place, as `put` says. If the
    body fails, it is deleted and the old one stays.

    Raises:
        OSError: It cannot be put in its place.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replaced(Path(folder) / "said.txt") as fresh:
        ...         _ = fresh.write_text("the sea")
        ...     os.listdir(folder)
        ['said.txt']
    """
    fresh = _temporary(path)
    try:
        yield fresh
        put(fresh, path)
    finally:
        _delete(fresh)


def put(fresh: Path, path: Path) -> None:
    """Write a file or folder to the disk with all that is in it, then give it the name of another one in its folder.

    A reader sees the old file or the new one, never a part, whenever the process or the machine stops. A folder that
    replaces another is missing for a moment, because the old one is moved away first; then that one is deleted.

    Raises:
        OSError: That is not possible. The old one is still there.
    """
    for place, _, names in os.walk(fresh):
        for each in (Path(place, name) for name in names):
            if not each.is_symlink():
                sync(each)
        sync(Path(place))
    if not fresh.is_dir():
        sync(fresh)
        fresh.replace(path)
        sync(path.parent)
        return
    old = _temporary(path)
    if os.path.lexists(path):
        path.rename(old)
    try:
        fresh.rename(path)
    except OSError:
        # Another process may have put its own there meanwhile.
        if os.path.lexists(old) and not os.path.lexists(path):
            old.rename(path)
        _delete(old)
        raise
    sync(path.parent)
    _delete(old)


def delete_unfinished(folder: Path) -> None:
    """Delete what killed processes left in a folder. No other process may be writing there."""
    for each in folder.glob(f".*{UNFINISHED}"):
        _delete(each)


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Turn errors of the file system in the body into one sentence about a file or folder.

    Raises:
        InputError: It cannot be written, for example because the disk is full.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} cannot be written: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """What the system said, without the words of a library around it."""
    message = (isinstance(error, OSError) and error.strerror) or str(error).partition("\n")[0]
    return message.partition("I/O error: ")[2].partition(" (os error")[0] or message


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    folder = path.is_dir()
    if os.name == "nt" and folder:
        # Windows opens no folders.
        return
    opened = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        # Some file systems cannot do that for folders.
        if not folder or error.errno != errno.EINVAL:
            raise
    finally:
        os.close(opened)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{UNFINISHED}")


def _delete(path: Path) -> None:
    """Delete a file or folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, each for this user alone whatever the umask is.

    Raises:
        OSError: It cannot be made.
    """
    if folder.is_dir():
        return
    if folder.exists():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    make_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def distrusted(path: Path) -> str | None:
    """Why somebody else may have written a file or folder; None if only this user and root can have.

    As ssh does for keys: it and each folder above must belong to this user or to root, and others must not be allowed
    to write there. In a folder that has the sticky bit, such as /tmp, others cannot replace what is not theirs.

    Raises:
        OSError: There is no such file or folder, or one of them is a symbolic link.
    """
    if not hasattr(os, "geteuid"):
        return None
    for each in (path, *path.parents):
        status = each.lstat()
        if stat.S_ISLNK(status.st_mode):
            raise OSError(errno.ELOOP, "it is a symbolic link", str(each))
        if status.st_uid not in (0, os.geteuid()):
            return f"{each} belongs to another user"
        sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        if status.st_mode & WRITTEN_BY_OTHERS and not sticky:
            return f"other users may write to {each} (chmod go-w takes that from them)"
    return None
