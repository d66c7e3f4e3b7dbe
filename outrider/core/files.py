"""Files that outlast a process: regular ones are read, whole ones are written, and who else may have written them."""

import errno
import os
import stat
import tempfile
from pathlib import Path

WRITTEN_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def read(file: Path) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: It cannot be read, or is no regular file: a named pipe would wait for a writer.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} is no regular file")
    return file.read_bytes()


def replace(file: Path, content: bytes) -> None:
    """Write a file whole: to the disk under a temporary name of its own, then renamed. The old one stays until then.

    Raises:
        OSError: It cannot be written. Nothing is left behind.
    """
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".", delete=False) as fresh:
        name = Path(fresh.name)
        try:
            fresh.write(content)
            fresh.flush()
            os.fsync(fresh.fileno())
            fresh.close()
            name.replace(file)
        finally:
            name.unlink(missing_ok=True)
    sync(file.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if os.name == "nt" and path.is_dir():
        # Windows opens no folders.
        return
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


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
