"""The plain weights of GGUF files, kept in the cache folder: unpacked once, then mapped as those of any checkpoint."""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from outrider.core import files
from outrider.host import remembered
from outrider.host.hashed import SETTLED, stamps_of

SOURCE = "source.json"
"""The file beside kept weights that says what they were made of."""
log = logging.getLogger("outrider.loading")


def kept(file: Path, dtype: str | torch.dtype) -> Path | None:
    """The folder with the weights of a GGUF file in a dtype; None where they are not kept, or the file has changed."""
    folder = _folder(file, dtype)
    try:
        found = json.loads(files.read(folder / SOURCE))
        return folder if found == _source(file, dtype) else None
    except (OSError, ValueError):
        return None


def keep(model: PreTrainedModel, file: Path, dtype: str | torch.dtype, began: int) -> Path | None:
    """Keep the weights that were made of a GGUF file, in the place of those of an earlier file of its name.

    Args:
        began: When reading began, in nanoseconds since the epoch. A file that was changed later is not trusted.

    Returns:
        Their folder; None where they cannot be kept, for example because the disk is full.
    """
    folder = _folder(file, dtype)
    try:
        source = _source(file, dtype)
        if source["file"][2] > began - SETTLED * 1e9:
            return None
        files.make_folder(folder.parent)
        with files.replaced(folder) as fresh:
            fresh.mkdir(mode=0o700)
            model.save_pretrained(fresh)
            (fresh / SOURCE).write_text(json.dumps(source), encoding="utf-8")
    except OSError as error:
        log.info("the unpacked weights of %s are not kept: %s", file.name, files.reason(error))
        return kept(file, dtype)
    log.info("the unpacked weights of %s are kept in %s", file.name, folder)
    return kept(file, dtype)


def _folder(file: Path, dtype: str | torch.dtype) -> Path:
    name = hashlib.sha256(f"{file.resolve()} {dtype}".encode()).hexdigest()[:32]
    return remembered.folder() / "unpacked" / name


def _source(file: Path, dtype: str | torch.dtype) -> dict[str, Any]:
    """What kept weights depend on."""
    [stamp] = stamps_of([file])
    return {"file": list(stamp), "dtype": str(dtype), "transformers": transformers.__version__}
