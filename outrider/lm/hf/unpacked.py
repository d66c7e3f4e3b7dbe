"""What was made of GGUF files, kept in the cache folder as transformers writes it: plain weights, tokenizers, configs.

Unpacking blocks and reading a vocabulary take many seconds. What is kept is read as any checkpoint is, and weights are
mapped from there, so that they need not stay in memory.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers

from outrider.core import files
from outrider.host import remembered
from outrider.host.hashed import SETTLED, stamps_of

SOURCE = "source.json"
"""The file beside what is kept that says what it was made of."""
log = logging.getLogger("outrider.loading")


def kept(file: Path, what: str) -> Path | None:
    """The folder with what was made of a GGUF file; None where it is not kept, or the file has changed.

    Args:
        what: `tokenizer`, `config`, or the dtype of weights.
    """
    folder = _folder(file, what)
    try:
        written_from = json.loads(files.read(folder / SOURCE))
        return folder if written_from == _source(file, what) else None
    except (OSError, ValueError):
        return None


def keep(file: Path, what: str, write: Callable[[Path], Any], began: int) -> Path | None:
    """Keep what was made of a GGUF file, in the place of what was made of an earlier file of its name.

    Args:
        what: As in `kept`.
        write: Writes it into a folder.
        began: When reading began, in nanoseconds since the epoch. A file that was changed later is not trusted.

    Returns:
        The folder; None where it cannot be written, for example because the disk is full.
    """
    folder = _folder(file, what)
    try:
        source = _source(file, what)
        if source["file"][2] > min(began, time.time_ns() - int(SETTLED * 1e9)):
            return None
        files.make_folder(folder.parent)
        with files.replaced(folder) as fresh:
            fresh.mkdir(mode=0o700)
            write(fresh)
            (fresh / SOURCE).write_text(json.dumps(source), encoding="utf-8")
    except OSError as error:
        log.info("what was unpacked of %s is not kept: %s", file.name, files.reason(error))
    return kept(file, what)


def _folder(file: Path, what: str) -> Path:
    name = hashlib.sha256(f"{file.resolve()} {what}".encode()).hexdigest()[:32]
    return remembered.folder() / "unpacked" / name


def _source(file: Path, what: str) -> dict[str, Any]:
    """What the content of a folder depends on."""
    [stamp] = stamps_of([file])
    return {"file": list(stamp), "what": what, "transformers": transformers.__version__}
