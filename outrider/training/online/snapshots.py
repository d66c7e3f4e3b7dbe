"""Snapshots of a draft model that learns: folders that load with `--drafter model:path=...`."""

import warnings
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outrider.core import files
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
        if place.exists():
            return
        try:
            with files.replaced(place) as fresh:
                model.save_pretrained(fresh)
                if self.tokenizer is not None:
                    self.tokenizer.save_pretrained(fresh)
        except Exception as error:
            reason = getattr(error, "strerror", None) or error
            warnings.warn(f"the snapshot {place} was not written: {reason}", RuntimeWarning, stacklevel=2)
