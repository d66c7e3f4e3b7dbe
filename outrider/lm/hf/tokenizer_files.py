"""The files of a tokenizer, beside a model that was made from another one."""

import json
import shutil
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import cached_file

from outrider.core.types import InputError
from outrider.lm.hf.open import open_tokenizer

PATTERNS = (
    "tokenizer*",
    "tokenization_*.py",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates",
)
"""Names of files and folders that belong to a tokenizer."""
CONFIG = "tokenizer_config.json"


def write_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer's files into a folder: copies of those that it was read from.

    `save_pretrained` of transformers 5 writes names that transformers 4 does not know. It is called only where there
    are no such files, as with a GGUF file, or where the tokenizer was changed after it was read. In both cases the
    names in the config become those that both versions know.

    Args:
        folder: It exists. Files of a tokenizer in it are replaced.
    """
    source = _source_of(tokenizer)
    if source is not None:
        for file in _files(source):
            copy = shutil.copytree if file.is_dir() else shutil.copyfile
            copy(file, folder / file.name)
        _rename_for_version_4(folder / CONFIG)
        if _reads_the_same(folder, tokenizer):
            return
        for file in _files(folder):
            shutil.rmtree(file) if file.is_dir() else file.unlink()
    tokenizer.save_pretrained(folder)
    _rename_for_version_4(folder / CONFIG)


def _files(folder: Path) -> list[Path]:
    return sorted({file for pattern in PATTERNS for file in folder.glob(pattern)})


def _source_of(tokenizer: PreTrainedTokenizerBase) -> Path | None:
    """The folder that a tokenizer was read from; of a hub id, the cached one. None if no such folder is there."""
    place = str(tokenizer.name_or_path)
    if Path(place).is_dir():
        return Path(place) if (Path(place) / CONFIG).is_file() else None
    try:
        cached = cached_file(place, CONFIG, local_files_only=True) if place else None
    except (OSError, ValueError):
        return None
    return None if cached is None else Path(cached).parent


def _rename_for_version_4(file: Path) -> None:
    """Exchange names of transformers 5 in a tokenizer's config for those that transformers 4 and 5 know."""
    if not file.is_file():
        return
    config = json.loads(file.read_text(encoding="utf-8"))
    renamed = dict(config)
    if config.get("tokenizer_class") == "TokenizersBackend":
        renamed["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        renamed["additional_special_tokens"] = renamed.pop("extra_special_tokens")
    if renamed != config:
        file.write_text(json.dumps(renamed, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _reads_the_same(folder: Path, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the files in a folder make this very tokenizer."""
    remote = type(tokenizer).__module__.startswith("transformers_modules")
    try:
        again = open_tokenizer(str(folder), trust_remote_code=remote)
    except InputError:
        return False
    return again is not None and _contents(again) == _contents(tokenizer)


def _contents(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    named = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    special = sorted(tokenizer.all_special_tokens)
    return {"words": tokenizer.get_vocab(), "named": named, "special": special, "template": tokenizer.chat_template}
