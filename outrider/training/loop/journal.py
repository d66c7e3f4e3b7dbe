"""The log of a run: JSON lines for programs, TensorBoard for people."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.core.types import InputError


class Journal:
    """What happened at each step, in `log.jsonl` and as TensorBoard's events.

    A run that goes on drops the lines of the steps that it will make again.

    Args:
        folder: Where the files are.
        step: How many steps the run has made.

    Raises:
        InputError: The files cannot be written.
    """

    def __init__(self, folder: Path, *, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.path = folder / "log.jsonl"
        try:
            kept = [each for each in read(self.path) if each.get("step", 0) <= step] if step else []
            self.path.write_text("".join(json.dumps(each) + "\n" for each in kept), encoding="utf-8")
            self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)
        except OSError as error:
            raise self._unwritten(error) from error

    def add(self, kind: str, step: int, numbers: Mapping[str, Any]) -> None:
        """Write a line. Numbers also become curves."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, "step": step, **numbers}) + "\n")
            for name, value in numbers.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    self._events.add_scalar(f"{kind}/{name}", value, step)
            self._events.flush()
        except OSError as error:
            raise self._unwritten(error) from error

    def close(self) -> None:
        """Close the files."""
        self._events.close()

    def _unwritten(self, error: OSError) -> InputError:
        return InputError(f"{self.path.parent} cannot be written: {error.strerror or os.strerror(error.errno or 0)}")


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a log. A last line that was cut off in the middle is left out."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found
