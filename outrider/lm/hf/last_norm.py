"""A hash of a checkpoint's last norm. Quantising leaves it as it is, so it tells one model in all of its formats."""

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.core.place import on_disk, place_of
from outrider.core.types import InputError
from outrider.lm.hf.gguf import header

FLOATS = "F32"
"""The kind of all norms in a GGUF file."""


def norm_of(target: str, revision: str | None = None) -> str | None:
    """A hash of the norm behind a model's last layer, as bfloat16; None if no such weights on this disk can be read.

    The norms of layers are left out: some quantisers put the scales of the next product into them.
    """
    try:
        place = on_disk(place_of(target, revision=revision), revision)
        files = [place] if place.is_file() else sorted(place.glob("*.safetensors"))
        return _hash(tuple((each, each.stat().st_mtime_ns) for each in files))
    except (InputError, OSError):
        return None


@lru_cache(maxsize=8)
def _hash(files: tuple[tuple[Path, int], ...]) -> str | None:
    """The hash of what stands in files that were last changed at these times."""
    try:
        [norm] = [values for file, _ in files for values in _last_norms(file)]
    except (SafetensorError, InputError, OSError, ValueError):
        return None
    return hashlib.sha256(norm.to(torch.bfloat16).view(torch.int16).numpy().tobytes()).hexdigest()[:32]


def _last_norms(file: Path) -> Iterator[Tensor]:
    """The norms of a file that belong to no layer."""
    if file.suffix != ".safetensors":
        for tensor in header(file).tensors:
            if _is_last(tensor.name) and len(tensor.shape) == 1 and tensor.kind == FLOATS:
                yield torch.from_numpy(np.fromfile(file, np.float32, tensor.shape[0], offset=tensor.begin))
        return
    with safe_open(file, "pt") as tensors:
        for name in filter(_is_last, tensors.keys()):
            yield tensors.get_tensor(name)


def _is_last(name: str) -> bool:
    """Whether a tensor is a norm whose name has no number of a layer."""
    return name.endswith("norm.weight") and not any(part.isdigit() for part in name.split("."))
