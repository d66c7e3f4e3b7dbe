"""Snapshots of a draft model that learns: folders that load with `--drafter model:path=...`."""

import os
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outrider.core.inputs import InputError


@dataclass(frozen=True, kw_only=True)
class Snapshots:
    """A folder of snapshots, one for each optimizer step at which one was taken.

    Attributes:
        folder: The folder.
        tokenizer: It is written beside the weights; None writes none.
    """

    folder: Path
    tokenizer: PreTrainedTokenizerBase | None

    def check(self) -> None:
        """Make the folder. Raises InputError if it cannot be made, or holds anything."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            held = any(self.folder.iterdir())
        except OSError as error:
            raise InputError(f"the folder of snapshots {self.folder} cannot be used: {error.strerror}") from error
        if held:
            raise InputError(f"the folder of snapshots {self.folder} is not empty; give a new one")

    def place(self, number: int) -> Path:
        """Where the snapshot of an optimizer step lies."""
        return self.folder / f"step-{number:06d}"

    def write(self, model: PreTrainedModel, number: int) -> None:
        """Write a snapshot, under another name until it is whole. If that fails, a Python warning says why."""
        place = self.place(number)
        fresh = place.with_name(f".{place.name}.{os.getpid()}")
        if place.exists():
            return
        try:
            model.save_pretrained(fresh)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(fresh)
            fresh.rename(place)
        except Exception as error:
            reason = getattr(error, "strerror", None) or error
            warnings.warn(f"the snapshot {place} was not written: {reason}", RuntimeWarning, stacklevel=2)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
