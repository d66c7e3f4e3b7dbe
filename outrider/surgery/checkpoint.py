"""A model's folder, written whole or not at all."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outrider.core.types import InputError

RECORD = "surgery.json"
"""The file that says how a model was cut."""


def check_free(folder: Path) -> None:
    """Raise InputError if a folder cannot become a new checkpoint because something is there already."""
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        raise InputError(f"{folder} exists already; give a new folder with --out, or remove it")


def write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path, record: Mapping[str, Any]
) -> None:
    """Write a model, its tokenizer, and how it was made, under a temporary name; then rename.

    Raises:
        InputError: The folder exists, or the disk is full or refuses. Then nothing is left behind.
    """
    check_free(folder)
    begun: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        begun = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        begun.chmod(0o755)
        model.save_pretrained(begun)
        if tokenizer is not None:
            tokenizer.save_pretrained(begun)
        (begun / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        begun.rename(folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot write to {folder}: {reason}; give another folder with --out") from error
    finally:
        if begun is not None:
            shutil.rmtree(begun, ignore_errors=True)
