"""Files that are whole or not there: checkpoints, and folders with a drafter."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

from outrider.core.types import InputError

PATTERN = re.compile(r"step-(\d+)\.pt")
HALF = ".half"
"""What the name of a file or folder ends with until all of it is on the disk."""


def write_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Make a file that appears under its name only when all of it is on the disk.

    Raises:
        InputError: It cannot be written, for example because the disk is full. Nothing of it is left.
    """
    half = path.with_name(path.name + HALF)
    try:
        with half.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(half, path)
        _sync(path.parent)
    except (OSError, RuntimeError) as error:
        half.unlink(missing_ok=True)
        raise _unwritten(path, error) from error


def write_folder(path: Path, write: Callable[[Path], object]) -> None:
    """Make a folder that appears under its name only when all files in it are on the disk. It replaces an older one.

    Raises:
        InputError: It cannot be written. Nothing of it is left.
    """
    half, old = path.with_name(path.name + HALF), path.with_name(path.name + ".old" + HALF)
    try:
        shutil.rmtree(half, ignore_errors=True)
        half.mkdir(parents=True)
        write(half)
        _sync_all(half)
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            os.replace(path, old)
        os.replace(half, path)
        _sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    except InputError:
        shutil.rmtree(half, ignore_errors=True)
        raise
    except Exception as error:
        shutil.rmtree(half, ignore_errors=True)
        if _is_of_disk(error):
            raise _unwritten(path, error) from error
        raise


def publish(folder: Path, out: Path) -> None:
    """Move the files of a folder into another one that may hold other files. `config.json` comes last, so that nobody
    loads a model that lacks some files.
    """
    config = out / "config.json"
    config.unlink(missing_ok=True)
    try:
        for file in sorted(folder.iterdir(), key=lambda each: each.name == config.name):
            place = out / file.name
            if place.is_dir():
                shutil.rmtree(place)
            os.replace(file, place)
        _sync(out)
        folder.rmdir()
    except OSError as error:
        raise _unwritten(out, error) from error


def save(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Write the checkpoint of a step, then delete older ones.

    Args:
        step: How many steps have been made.
        state: Tensors and plain values.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / f"step-{step:08d}.pt", lambda file: torch.save(state, file))
    for other in _steps(folder):
        if other != step:
            (folder / f"step-{other:08d}.pt").unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Make the folder of a run. Raises InputError if that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the folder {folder} cannot be made: {error.strerror}; give another one") from error


def delete_folders(folder: Path, pattern: str, kept: str) -> None:
    """Delete all folders of a pattern but one."""
    for each in folder.glob(pattern):
        if each.name != kept and each.is_dir():
            shutil.rmtree(each, ignore_errors=True)


def newest(folder: Path) -> Path | None:
    """The checkpoint with the most steps; None if there is none. Half-written files are deleted."""
    for half in folder.glob(f"*{HALF}"):
        if half.is_dir():
            shutil.rmtree(half, ignore_errors=True)
        else:
            half.unlink(missing_ok=True)
    steps = _steps(folder)
    return folder / f"step-{steps[-1]:08d}.pt" if steps else None


def read(file: Path) -> dict[str, Any]:
    """The state of a checkpoint, on the CPU. Raises InputError if the file is damaged."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise InputError(f"the checkpoint {file} cannot be read: {error}; delete it to begin again") from error


def _steps(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    return sorted(int(found[1]) for each in folder.iterdir() if (found := PATTERN.fullmatch(each.name)))


def _is_of_disk(error: Exception) -> bool:
    """Whether writing failed; safetensors has an error of its own, and so has what torch writes archives with."""
    return isinstance(error, OSError) or type(error).__name__ == "SafetensorError" or "os error" in str(error).lower()


def _unwritten(path: Path, error: Exception) -> InputError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
    return InputError(f"{path} cannot be written: {reason}; nothing of it was kept. Free space, then start again")


def _sync_all(folder: Path) -> None:
    for place, _, names in os.walk(folder):
        for name in names:
            _sync(Path(place) / name)
        _sync(Path(place))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
