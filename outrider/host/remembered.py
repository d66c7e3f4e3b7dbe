"""What was measured on this machine, kept between runs in the user's cache folder."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outrider.core import files

INSTRUCTIONS = ("avx", "amx", "fma", "asimd", "sve", "bf16", "i8mm")
"""How the names of instruction sets begin that change the time of a forward."""


def read(kind: str, key: Mapping[str, Any]) -> dict[str, Any] | None:
    """What `write` kept for this kind and key, by earlier processes too; None if there is nothing.

    What is missing, damaged, no regular file, or of another key counts as nothing, so that the caller measures again.

    Args:
        kind: What was measured, as a word, such as `costs`. It begins the file's name.
        key: Everything that the values depend on: `machine()` and a description of the model. Values of JSON.
    """
    try:
        record = json.loads(files.read(_file(kind, key)))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("key") != _plain(key) or not isinstance(record.get("values"), dict):
        return None
    return record["values"]


def write(kind: str, key: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Keep values for `read`. The old file stays until the new one is complete.

    Does nothing if the folder cannot be written.

    Args:
        kind: What was measured, as in `read`.
        key: Everything that the values depend on, as in `read`.
        values: What was measured, as values of JSON.
    """
    text = json.dumps({"key": _plain(key), "values": _plain(values)}, indent=1) + "\n"
    with suppress(OSError):
        files.make_folder(folder())
        files.replace(_file(kind, key), text.encode(), mode=0o600)


def folder() -> Path:
    """Where the files are: `OUTRIDER_CACHE`, otherwise `outrider` in `XDG_CACHE_HOME` or in `~/.cache`.

    Set `OUTRIDER_CACHE=/dev/null` to keep nothing.
    """
    if folder := os.environ.get("OUTRIDER_CACHE"):
        return Path(folder)
    shared = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    base = Path(shared) if os.path.isabs(shared) else Path(os.path.expanduser("~")) / ".cache"
    return base / "outrider"


def machine(device: torch.device | None = None) -> dict[str, Any]:
    """This machine and its software: a part of every key.

    Args:
        device: Where the model is; the name of a GPU becomes part of the key.
    """
    cuda = device is not None and device.type == "cuda"
    return {
        "cpu": cpu_name(),
        "instructions": _instructions(),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if cuda else getattr(device, "type", "cpu"),
        "versions": {name: _version(name) for name in ("torch", "transformers", "outrider")},
    }


def shapes(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """The class of each module, and a hash of its weights' names, sizes, types and layers, not of their values."""
    described = {}
    for name, module in modules.items():
        # Asking some quantised layers for their state_dict changes them.
        kept = [*module.named_parameters(), *module.named_buffers()]
        owners = [type(module.get_submodule(key.rpartition(".")[0])).__name__ for key, _ in kept]
        weights = [
            [key, list(weight.shape), str(weight.dtype), owner]
            for (key, weight), owner in zip(kept, owners, strict=True)
        ]
        described[name] = f"{type(module).__name__} {_hash(weights)}"
    return described


def cpu_name() -> str:
    """The processor's name as Linux gives it, elsewhere what Python knows."""
    return _of_cpu("model name") or platform.processor() or platform.machine()


def _instructions() -> list[str]:
    """The instruction sets that change the time of a forward, as Linux names them."""
    names = (_of_cpu("flags") or _of_cpu("Features")).split()
    return sorted({name for name in names if name.startswith(INSTRUCTIONS)})


@cache
def _of_cpu(field: str) -> str:
    """A field of the first processor in Linux's table; empty if it is not there."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(field) and ":" in line), "")


@cache
def _version(package: str) -> str | None:
    """The version of an installed package; None if the package runs from a folder."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _file(kind: str, key: Mapping[str, Any]) -> Path:
    """The file of a record."""
    return folder() / f"{kind}-{_hash(key)}.json"


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, allow_nan=False).encode()).hexdigest()[:32]


def _plain(values: Mapping[str, Any]) -> Any:
    """The values as they come back from a file: lists instead of tuples, text instead of numbers as names."""
    return json.loads(json.dumps(values, allow_nan=False))
