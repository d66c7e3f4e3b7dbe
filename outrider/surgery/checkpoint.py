"""A model's folder, written whole or not at all."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outrider.core import files
from outrider.core.destination import check_free
from outrider.core.types import InputError
from outrider.lm.hf.tokenizer_files import write_tokenizer

RECORD = "surgery.json"
"""The file that says how a model was cut."""


def write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path, record: Mapping[str, Any]
) -> None:
    """Write a model, its tokenizer, and how it was made, under a temporary name; then rename.

    Raises:
        InputError: The folder exists, or the disk is full or refuses. Then nothing is left behind.
    """
    check_free(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with files.replaced(folder) as fresh:
            fresh.mkdir()
            model.save_pretrained(fresh)
            if tokenizer is not None:
                write_tokenizer(tokenizer, fresh)
            (fresh / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            # Another program may have written there meanwhile.
            check_free(folder)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write to {folder}: {files.reason(error)}; give another folder with --out") from error
