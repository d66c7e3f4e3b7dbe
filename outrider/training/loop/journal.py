"""The log of a run: JSON lines for programs, an experiment tracker for people."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers

from outrider.core import files
from outrider.core.types import InputError
from outrider.training.loop.settings import TENSORBOARD

BEGINNING = b'{"kind": "settings"'
"""How every log begins."""


class Journal:
    """What happened at each step, in `log.jsonl` and as curves of TensorBoard and of trackers that accelerate runs.

    A run that goes on drops the lines of the steps that it will make again.

    Args:
        folder: Where the files are.
        step: How many steps the run has made.
        accelerator: Runs the trackers that it was made with; None: there are none.
        tensorboard: Whether TensorBoard's files are written.

    Raises:
        InputError: The files cannot be written, or a tracker does not start.
    """

    def __init__(
        self, folder: Path, *, step: int, accelerator: Accelerator | None = None, tensorboard: bool = True
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._accelerator = accelerator
        self.path = folder / "log.jsonl"
        try:
            kept = [each for each in read(self.path) if each.get("step", 0) <= step] if step else []
            files.replace(self.path, "".join(json.dumps(each) + "\n" for each in kept).encode())
            purged = step + 1 if step else None
            place = str(folder / "tensorboard")
            self._events = SummaryWriter(place, purge_step=purged) if tensorboard else None
        except OSError as error:
            raise self._unwritten(error) from error
        if accelerator is not None:
            try:
                accelerator.init_trackers("outrider")
            except Exception as error:
                names = ", ".join(str(each) for each in accelerator.log_with)
                raise InputError(f"the tracker {names} does not start: {error}") from error

    def add(self, kind: str, step: int, numbers: Mapping[str, Any]) -> None:
        """Write a line. Numbers also become curves."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, "step": step, **numbers}) + "\n")
            curves = {f"{kind}/{name}": value for name, value in numbers.items() if type(value) in (int, float)}
            if self._accelerator is not None:
                self._accelerator.log(curves, step=step)
            if self._events is not None:
                for name, value in curves.items():
                    self._events.add_scalar(name, value, step)
                self._events.flush()
        except OSError as error:
            raise self._unwritten(error) from error

    def close(self) -> None:
        """Close the files, and end the tracker's run."""
        if self._events is not None:
            self._events.close()
        if self._accelerator is not None:
            for tracker in self._accelerator.trackers:
                tracker.finish()

    def _unwritten(self, error: OSError) -> InputError:
        return InputError(f"{self.path.parent} cannot be written: {error.strerror or os.strerror(error.errno or 0)}")


def begins_run(path: Path) -> bool:
    """Whether a file is the log of a run: its first line holds the settings."""
    with path.open("rb") as file:
        return file.read(len(BEGINNING)) == BEGINNING


def trackers_of(names: Sequence[str]) -> list[str]:
    """The trackers that accelerate runs: all but TensorBoard, whose files the journal writes itself.

    Raises:
        InputError: A tracker is not installed.
    """
    there = [str(each) for each in get_available_trackers()]
    trackers = [name for name in names if name != TENSORBOARD]
    for name in trackers:
        if name not in there:
            raise InputError(f"the tracker {name} is not installed; install its package, or use --tracker tensorboard")
    return trackers


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a log. A last line that was cut off in the middle is left out."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows
