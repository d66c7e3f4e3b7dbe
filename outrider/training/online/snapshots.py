"""Snapshots of a draft model that learns: folders that load with `--drafter model:path=...`."""

import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from outrider.core import files
from outrider.core.inputs import InputError

SNAPSHOT = re.compile(r"step-(\d{6,})")
"""The name of a snapshot's folder."""


@dataclass(frozen=True, kw_only=True)
class Snapshots:
    """A folder of snapshots, one for each optimizer step at which one was taken.

    Attributes:
        folder: The folder.
        tokenizer: It is written beside the weights; None writes none.
    """

    folder: Path
    tokenizer: PreTrainedTokenizerBase | None

    def check(self, *, resume: bool = False) -> None:
        """Make the folder. Raises InputError if it cannot be made, or holds anything that it must not.

        Args:
            resume: Whether it may hold snapshots. What a killed process left unfinished is deleted.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if resume:
                files.delete_unfinished(self.folder)
            held = any(not (resume and SNAPSHOT.fullmatch(each.name)) for each in self.folder.iterdir())
        except OSError as error:
            raise InputError(f"the folder of snapshots {self.folder} cannot be used: {error.strerror}") from error
        if held and resume:
            raise InputError(f"the folder of snapshots {self.folder} holds other files too; give a new one")
        if held:
            raise InputError(f"the folder of snapshots {self.folder} is not empty; give a new one")

    def newest(self) -> int | None:
        """The optimizer step of the newest snapshot; None if there is none."""
        matches = [SNAPSHOT.fullmatch(each.name) for each in self.folder.iterdir()]
        return max((int(match[1]) for match in matches if match), default=None)

    def read(self, number: int) -> PreTrainedModel:
        """The model of a snapshot. Raises InputError if it cannot be read."""
        try:
            with torch.inference_mode(False):
                return AutoModelForCausalLM.from_pretrained(self.place(number), use_safetensors=True)
        except (OSError, ValueError, SafetensorError) as error:
            raise InputError(f"the snapshot {self.place(number)} cannot be read: {error}; delete it") from error

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
