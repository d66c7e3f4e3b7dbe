"""Files that are whole or not there: checkpoints, and folders with a drafter."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from outrider.core import files
from outrider.core.types import InputError

PATTERN = re.compile(r"step-(\d+)\.pt")


def write_folder(path: Path, write: Callable[[Path], object]) -> None:
    """Make a folder that appears under its name only when all files in it are on the disk. It replaces an older one.

    Raises:
        InputError: It cannot be written. Nothing of it is left.
    """
    with _whole(path), files.replaced(path) as fresh:
        fresh.mkdir(parents=True)
        write(fresh)


def publish(folder: Path, out: Path) -> None:
    """Move the files of a folder into another one that may hold other files. `config.json` comes last, so that nobody
    loads a model that lacks some files.
    """
    config = out / "config.json"
    config.unlink(missing_ok=True)
    with _whole(out):
        for file in sorted(folder.iterdir(), key=lambda each: each.name == config.name):
            place = out / file.name
            if place.is_dir():
                shutil.rmtree(place)
            os.replace(file, place)
        files.sync(out)
        folder.rmdir()


def save(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Write the checkpoint of a step, then delete older ones.

    Args:
        step: How many steps have been made.
        state: Tensors and plain values.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:08d}.pt"
    with _whole(path), files.replaced(path) as fresh, fresh.open("wb") as file:
        torch.save(state, file)
    for other in steps(folder):
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
    files.delete_unfinished(folder)
    saved = steps(folder)
    return folder / f"step-{saved[-1]:08d}.pt" if saved else None


def steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for each in folder.iterdir() if (match := PATTERN.fullmatch(each.name)))


def read(file: Path) -> dict[str, Any]:
    """The state of a checkpoint, on the CPU. Raises InputError if the file is damaged."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise InputError(f"the checkpoint {file} cannot be read: {error}; delete it to begin again") from error


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Turn errors of the file system in the body into a sentence about a file or folder of which nothing is kept."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        # What torch writes archives with has an error of its own, and tokenizers raise a bare Exception.
        cause = error.__context__ if isinstance(error, RuntimeError) and error.__context__ else error
        if not isinstance(cause, OSError | SafetensorError) and "os error" not in str(cause).lower():
            raise
        raise InputError(
            f"{path} cannot be written: {files.reason(cause)}; nothing of it was kept. Free space, then start again"
        ) from error
