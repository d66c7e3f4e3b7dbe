"""Where a checkpoint is: a directory, a GGUF file or an id on the hub. A name that is none of them is told at once."""

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from outrider.core.inputs import InputError, shown

LONGEST_ID = 256
"""Longer than any hub id."""
PATIENCE = 10.0
"""Seconds to wait for the hub's first answer."""
CONFIGS = ("config.json", "adapter_config.json")
"""The configs of a model and of an adapter; a directory with one of them is no folder of GGUF files."""
GGUF, MAGIC = ".gguf", b"GGUF"
"""How the name of a GGUF file ends, and how its content begins."""
ONE_OF_SEVERAL = re.compile(r"-\d+-of-(\d+)\.gguf$")
"""The end of the name of a file that holds a part of a model."""


@dataclass(frozen=True, kw_only=True)
class CheckpointPlace:
    """A checkpoint, as transformers takes it.

    Attributes:
        name: What was given.
        folder: A directory or a hub id.
        gguf: The GGUF file in the folder that holds the checkpoint; None where the folder itself does.
    """

    name: str
    folder: str
    gguf: str | None = None

    @property
    def file(self) -> Path | None:
        """The GGUF file on disk; None where the checkpoint is none."""
        return None if self.gguf is None else Path(self.folder, self.gguf)


def place_of(name: str, what: str = "model", revision: str | None = None) -> CheckpointPlace:
    """Where the checkpoint of a name is. A GGUF file on the hub is fetched first.

    Args:
        name: A directory, a GGUF file, a directory that holds nothing but one, a hub id, or a hub id with a GGUF file
            in it, as `org/name:file.gguf`.
        what: What the place holds, for messages.
        revision: Branch, tag or commit of a hub id.

    Raises:
        InputError: There is nothing of that name, a file is no GGUF file, or a directory holds several.
    """
    if os.path.isfile(name):
        return _of_file(name, Path(name), what)
    if os.path.isdir(name):
        return _of_directory(name, what)
    repository, _, file = name.rpartition(":")
    if name.endswith(GGUF) and not repository:
        raise InputError(f"there is no file {shown(name)}; give a GGUF file that is there")
    if name.endswith(GGUF) and not looks_local(repository):
        return _of_file(name, _fetched(repository, file, what, revision), what)
    check_place(name, what, revision)
    return CheckpointPlace(name=name, folder=name)


def on_disk(place: CheckpointPlace, revision: str | None = None) -> Path:
    """The GGUF file or the directory of a checkpoint that was opened. That of a hub id lies in the hub's cache.

    Args:
        revision: Branch, tag or commit of the hub id that was opened.
    """
    from huggingface_hub import try_to_load_from_cache

    if place.file is not None:
        return place.file
    kept = None
    if not os.path.isdir(place.folder):
        kept = try_to_load_from_cache(place.folder, CONFIGS[0], revision=revision)
    return Path(kept).parent if isinstance(kept, str) else Path(place.folder)


def is_gguf(file: Path) -> bool:
    """Whether a file begins as GGUF files do."""
    with open(file, "rb") as opened:
        return opened.read(len(MAGIC)) == MAGIC


def check_place(path: str, what: str = "model", revision: str | None = None) -> None:
    """Raise InputError where a name can be neither a directory nor a hub id that can be reached.

    Without this, libraries ask an unreachable hub for half a minute, file by file.

    Args:
        what: What the place holds, for the message.
        revision: Branch, tag or commit of a hub id.
    """
    if os.path.isdir(os.path.expanduser(path)):
        return
    if os.path.isfile(path):
        raise InputError(f"{path} is a file; give a {what}'s directory or a hub id such as org/name")
    absent = f"there is no directory {path if 0 < len(path) <= LONGEST_ID else shown(path)}"
    if looks_local(path):
        raise InputError(f"{absent}; give a {what}'s directory or a hub id such as org/name")
    if (reason := _unreachable(path, "config.json", revision or "main")) is not None:
        raise InputError(f"{absent}, and the hub cannot be reached to look for a {what} of that name: {reason}")


def looks_local(path: str) -> bool:
    """Whether a name can be no hub id: it begins or ends as a path, has several slashes, or is too long.

    Example:
        >>> [looks_local(name) for name in ("org/name", "gpt2", "./name", "a/b/c", "runs/")]
        [False, False, True, True, True]
    """
    begins = path.startswith((".", "/", "~")) or os.path.isabs(path)
    return not path or begins or path.endswith("/") or path.count("/") > 1 or len(path) > LONGEST_ID


def _of_file(name: str, file: Path, what: str) -> CheckpointPlace:
    """The place of a file, if it holds a whole model."""
    if not is_gguf(file):
        raise InputError(
            f"{name} is a file, but no GGUF model; give a {what}'s directory, a GGUF file or a hub id such as org/name"
        )
    if (part := ONE_OF_SEVERAL.search(file.name)) is not None and int(part[1]) > 1:
        raise InputError(
            f"{name} is one of {int(part[1])} parts of a model, and transformers reads whole files; join them with "
            "`llama-gguf-split --merge`"
        )
    return CheckpointPlace(name=name, folder=str(file.parent), gguf=file.name)


def _of_directory(name: str, what: str) -> CheckpointPlace:
    """The place of a directory: its GGUF file where it holds nothing else that a model or a tokenizer could be."""
    has_config = any(os.path.isfile(os.path.join(name, config)) for config in CONFIGS)
    if has_config or (what == "tokenizer" and any(Path(name).glob("*token*"))):
        return CheckpointPlace(name=name, folder=name)
    files = sorted(file.name for file in Path(name).glob(f"*{GGUF}"))
    if len(files) > 1:
        raise InputError(f"{name} holds {len(files)} GGUF files: {', '.join(files)}; name one, as {name}/{files[0]}")
    return (
        _of_file(os.path.join(name, files[0]), Path(name, files[0]), what)
        if files
        else CheckpointPlace(name=name, folder=name)
    )


def _fetched(repository: str, file: str, what: str, revision: str | None) -> Path:
    """A file of a hub id on disk."""
    from huggingface_hub import hf_hub_download

    if (reason := _unreachable(repository, file, revision or "main")) is not None:
        raise InputError(
            f"there is no file {repository}:{file}, and the hub cannot be reached to look for a {what} of that name: "
            f"{reason}"
        )
    try:
        return Path(hf_hub_download(repository, file, revision=revision))
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"cannot fetch {file} of {repository}: {reason}") from error


@lru_cache(maxsize=64)
def _unreachable(repository: str, file: str, revision: str) -> str | None:
    """Why the hub gives no answer about a file that is not in its cache, tried once; None where it answers."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        if constants.HF_HUB_OFFLINE or isinstance(try_to_load_from_cache(repository, file, revision=revision), str):
            return None
        get_hf_file_metadata(hf_hub_url(repository, file, revision=revision), timeout=PATIENCE)
    except (HfHubHTTPError, HFValidationError):
        # The hub has answered, or will not be asked; whoever loads the files says what is wrong.
        return None
    except Exception as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return None
