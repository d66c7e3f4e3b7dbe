"""The files of a trained head: one JSON config and its tensors, in a directory or at a hub id."""

import json
import math
import os
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from reprlib import repr as short
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME, cached_file

from outrider.core import files
from outrider.core.place import check_place
from outrider.core.types import InputError
from outrider.lm.hf.weights import has_other_than_numbers

CONFIG, WEIGHTS = "config.json", "model.safetensors"
"""The files that are written."""
READ = (WEIGHTS, "pytorch_model.bin", "medusa_lm_head.safetensors", "medusa_lm_head.pt", "hydra_lm_head.pt")
"""The files that may hold all tensors; the first that is there is read."""
INDICES = (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME)
"""The files that say which file holds which tensor, where several do. They come after `READ`: beside the file of Medusa
heads, they are those of the model."""
CONVENTION = "tap k enters decoder layer k; the last tap leaves the last layer, before the final norm"
"""Which hidden states taps are; other projects number the outputs of layers, or normed states."""
TARGET = "outrider_target"
"""The key of a config that says for which target a head was trained."""
KIND = "outrider_head"
"""The key of a config that names the drafter of a head which other engines do not know."""
MOST_SIZE, MOST_COUNT = 1_000_000, 256
"""The largest width that a config may name, and the most layers, heads or tokens of a draft."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes of weights. Others are those of quantised heads."""
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class TargetShape:
    """The target that a head was trained for. Published heads do not say it.

    Attributes:
        num_layers: Its decoder layers.
        hidden_size: Width of its hidden states.
        vocab_size: Width of its logits.
        taps: The hidden states that the head reads, in order.
    """

    num_layers: int
    hidden_size: int
    vocab_size: int
    taps: tuple[int, ...]

    def record(self) -> dict[str, Any]:
        """The value of the key `TARGET`."""
        return {**asdict(self), "taps": list(self.taps), "convention": CONVENTION}

    @classmethod
    def of(cls, config: Mapping[str, Any], path: str) -> "TargetShape | None":
        """The target that a config names; None if it names none.

        Raises:
            InputError: The entry is damaged, or counts hidden states otherwise.
        """
        entry = config.get(TARGET)
        if entry is None:
            return None
        try:
            if entry["convention"] != CONVENTION:
                raise InputError(f"{CONFIG} of {path} numbers hidden states otherwise: {entry['convention']!r}")
            sizes = {name: size(entry, name, path) for name in ("num_layers", "hidden_size", "vocab_size")}
            return cls(**sizes, taps=whole_numbers(entry["taps"], "taps", path))
        except (AttributeError, KeyError, TypeError) as error:
            raise InputError(f"the entry {TARGET!r} in {CONFIG} of {path} is damaged; train the head again") from error


def read_config(path: str, *, revision: str | None = None) -> dict[str, Any]:
    """The config of a head.

    Raises:
        InputError: There is none, it is not a JSON object, or its architectures are no list of names.
    """
    file = _file(path, CONFIG, revision)
    if file is None:
        raise InputError(f"there is no head in {path}: it has no {CONFIG}")
    config = json_object(file, CONFIG, path)
    named = config.get("architectures")
    if named is not None and not (isinstance(named, list) and all(isinstance(each, str) for each in named)):
        raise InputError(f"architectures in {CONFIG} of {path} must be a list of names, got {short(named)}")
    return config


def size(
    config: Mapping[str, Any],
    name: str,
    path: str,
    *,
    default: int | None = None,
    least: int = 1,
    most: int = MOST_SIZE,
    file: str = CONFIG,
) -> int:
    """A whole number of a config.

    Args:
        default: What counts where the config has no such key, or null.
        file: The file that the config stands in, for messages.

    Raises:
        InputError: It is no whole number, or out of bounds.
    """
    value = default if config.get(name) is None else config[name]
    if type(value) is not int or not least <= value <= most:
        raise InputError(
            f"{name} in {file} of {path} must be a whole number in {least}..{most}, got {short(value)}; get the "
            "config that belongs to the head"
        )
    return value


def factor(config: Mapping[str, Any], name: str, path: str) -> float:
    """A positive number of a config; 1 where it has no such key. Raises InputError for other values."""
    value = 1.0 if config.get(name) is None else config[name]
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise InputError(f"{name} in {CONFIG} of {path} must be a number above 0, got {short(value)}")
    return float(value)


def whole_numbers(value: Any, name: str, path: str, *, file: str = CONFIG) -> tuple[int, ...]:
    """A list of whole numbers >= 0 of a config. Raises InputError for other values."""
    listed = isinstance(value, list | tuple) and len(value) <= MOST_COUNT
    if not listed or any(type(each) is not int or not 0 <= each <= MOST_SIZE for each in value):
        raise InputError(
            f"{name} in {file} of {path} must be a list of at most {MOST_COUNT} whole numbers >= 0, got {short(value)}"
        )
    return tuple(value)


def nested(config: Mapping[str, Any], name: str, path: str) -> Mapping[str, Any]:
    """An object inside a config; empty where it has no such key. Raises InputError for other values."""
    value = {} if config.get(name) is None else config[name]
    if not isinstance(value, Mapping):
        raise InputError(f"{name} in {CONFIG} of {path} must be an object, got {short(value)}")
    return value


def read_names(path: str, *, revision: str | None = None) -> frozenset[str]:
    """The names of a checkpoint's tensors; none if it has no file that a head can have."""
    file = _weights(path, revision)
    if file is None:
        index = _index(path, revision)
        return frozenset() if index is None else frozenset(index)
    if file.endswith(".safetensors"):
        try:
            with safe_open(file, framework="pt") as opened:
                return frozenset(opened.keys())
        except (SafetensorError, OSError):
            return frozenset()
    return frozenset(_pickled(file, path))


def read_tensors(
    path: str, *, revision: str | None = None, needs: Callable[[str], bool] | None = None
) -> dict[str, Tensor]:
    """The tensors of a head, from one file or from several with an index.

    Args:
        needs: Which tensors are needed. Of several files, those with none of them are neither downloaded nor read.
            None: all.

    Raises:
        InputError: There are none, they are damaged, or they hold values that are not numbers.
    """
    weights = _weights(path, revision)
    if weights is not None:
        return file_tensors(weights, path, needs=needs)
    index = _index(path, revision)
    if index is None:
        raise InputError(
            f"there are no weights of a head in {path}; it must have one of {', '.join((*READ, *INDICES))}"
        )
    tensors: dict[str, Tensor] = {}
    for shard in sorted({file for name, file in index.items() if needs is None or needs(name)}):
        if os.path.basename(shard) != shard:
            raise InputError(f"the index of the weights of {path} names {shard}, which is not beside it")
        place = _file(path, shard, revision)
        if place is None:
            raise InputError(f"{shard} of {path} is missing, and the index of the weights names it")
        tensors |= file_tensors(place, path, needs=needs)
    return tensors


def local_file(path: str, name: str, *, revision: str | None = None) -> str | None:
    """A local copy of another file beside a head, in a directory or at a hub id; None if there is none."""
    return _file(path, name, revision)


def write_head(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> None:
    """Write a head's two files, each whole or not at all.

    Args:
        dtype: Of the written floating-point tensors; None keeps theirs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: _written(tensor, dtype) for name, tensor in tensors.items()}
    with files.replaced(folder / WEIGHTS) as fresh:
        save_file(kept, fresh, metadata={"format": "pt"})
    files.replace(folder / CONFIG, (json.dumps(config, indent=2) + "\n").encode())


def build_module(make: Callable[[], M], tensors: Mapping[str, Tensor], path: str, *, unused: Collection[str] = ()) -> M:
    """The module that a config describes, with its tensors.

    The shapes are compared before the module has memory, because a config may name any sizes.

    Args:
        make: Makes the module.
        unused: As for `load_into`.

    Raises:
        InputError: As `load_into`.
    """
    with torch.device("meta"):
        _compare(make(), tensors, path, unused)
    module = make()
    load_into(module, tensors, path, unused=unused)
    return module


def load_into(module: nn.Module, tensors: Mapping[str, Tensor], path: str, *, unused: Collection[str] = ()) -> None:
    """Give a module its tensors.

    Args:
        unused: Names of tensors that may be there and are not read.

    Raises:
        InputError: A tensor is missing, has another shape or another kind of numbers, or is not part of the module.
    """
    _compare(module, tensors, path, unused)
    module.load_state_dict({name: tensors[name] for name in module.state_dict()}, assign=True)


def _compare(module: nn.Module, tensors: Mapping[str, Tensor], path: str, unused: Collection[str]) -> None:
    """Raise InputError if tensors are not those of a module."""
    wanted, stored = module.state_dict(), {name: each for name, each in tensors.items() if name not in unused}
    both = [(name, wanted[name], stored[name]) for name in sorted(wanted.keys() & stored.keys())]
    faults = [
        *_faults(sorted(wanted.keys() - stored.keys()), "missing"),
        *_faults(sorted(stored.keys() - wanted.keys()), "not part of such a head"),
        *_faults([name for name, ours, theirs in both if ours.shape != theirs.shape], "of another shape"),
        *_faults([name for name, ours, theirs in both if _kind(ours) != _kind(theirs)], "of another kind of numbers"),
    ]
    if faults:
        raise InputError(
            f"the tensors in {path} are not those of the head that its config describes: {', '.join(faults)}"
        )


def _kind(tensor: Tensor) -> str:
    """The kind of a tensor's numbers."""
    return "weights" if tensor.is_floating_point() else "truths" if tensor.dtype is torch.bool else "whole numbers"


def _faults(names: Sequence[str], what: str, most: int = 3) -> list[str]:
    """Names with what is wrong with them; of many, the first."""
    if not names:
        return []
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return [f"{', '.join(names[:most])}{rest} {'is' if len(names) == 1 else 'are'} {what}"]


def _written(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", kind).contiguous()


def _weights(path: str, revision: str | None) -> str | None:
    return next((place for name in READ if (place := _file(path, name, revision)) is not None), None)


def _index(path: str, revision: str | None) -> dict[str, str] | None:
    """Which file holds which tensor, where several do; None if no file says it."""
    for name in INDICES:
        if (place := _file(path, name, revision)) is None:
            continue
        weight_map = json_object(place, name, path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise InputError(f"{name} of {path} must have a weight_map from tensors to files")
        return weight_map
    return None


def json_object(file: str, name: str, path: str) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        name: The file, for messages.
        path: The directory or hub id that has it, for messages.

    Raises:
        InputError: There is none.
    """
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except RecursionError as error:
        raise InputError(f"{name} of {path} cannot be read: it is nested too deeply") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{name} of {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{name} of {path} must be a JSON object")
    return content


def file_tensors(file: str, path: str, *, needs: Callable[[str], bool] | None = None) -> dict[str, Tensor]:
    """The tensors of one file, or those that are needed. Arguments and errors are those of `read_tensors`."""
    read = _safe(file, path) if file.endswith(".safetensors") else _pickled(file, path)
    tensors = {name: tensor for name, tensor in read.items() if needs is None or needs(name)}
    for name, tensor in tensors.items():
        if reason := _unsound(tensor):
            raise InputError(f"{name} in {Path(file).name} of {path} {reason}")
    return tensors


def _safe(file: str, path: str) -> dict[str, Tensor]:
    """The tensors of a file in the format safetensors. Raises InputError if it cannot be read."""
    try:
        return load_file(file)
    except Exception as error:
        raise InputError(f"{Path(file).name} of {path} cannot be read: {error}") from error


def _unsound(tensor: Tensor) -> str | None:
    """Why a tensor is none of a head, in words; None if it may be."""
    if tensor.layout is not torch.strided or not tensor.dim():
        return "is no plain tensor with dimensions; the file is damaged, so get it again"
    if tensor.is_complex() or (tensor.is_floating_point() and tensor.dtype not in DTYPES):
        allowed = ", ".join(str(each).removeprefix("torch.") for each in DTYPES)
        return f"is of {tensor.dtype}, and heads have weights of {allowed}; get the head that is not quantised"
    if has_other_than_numbers(tensor):
        return "holds values that are not numbers (NaN or infinity); the file is damaged, so get it again"
    return None


def _pickled(file: str, path: str) -> dict[str, Tensor]:
    """The tensors of a file of `torch.save`, without running any code of it."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{Path(file).name} of {path} holds more than tensors, or is damaged, and to read it all would run code of "
            "its author; convert the tensors to safetensors, or ask the author for such a file"
        ) from error
    except Exception as error:
        raise InputError(
            f"{Path(file).name} of {path} cannot be read as a file of tensors; get it again, or a file of safetensors"
        ) from error
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise InputError(
            f"{Path(file).name} of {path} holds other things than tensors; save the tensors alone, as safetensors"
        )
    return {str(name): tensor for name, tensor in content.items()}


def _file(path: str, name: str, revision: str | None) -> str | None:
    """A local copy of a file in a directory or at a hub id; None if there is none."""
    if os.path.isdir(path):
        place = os.path.join(path, name)
        return place if os.path.isfile(place) else None
    check_place(path, "head", revision)
    try:
        cached = cached_file(path, name, revision=revision or "main")
    except (OSError, ValueError):
        return None
    return None if cached is None else str(cached)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The files of a head in a directory or at a hub id, whatever their layout. They are read when they are asked for.

    Attributes:
        path: The directory or the hub id.
        revision: Branch, tag or commit of a hub id.
        own_config: What stands for its config; None: what its file says.
        own_tensors: What stands for its tensors; None: those of its files.
    """

    path: str
    revision: str | None = None
    own_config: Mapping[str, Any] | None = None
    own_tensors: Mapping[str, Tensor] | None = None

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """Its config, as `read_config` reads it."""
        return read_config(self.path, revision=self.revision) if self.own_config is None else self.own_config

    @cached_property
    def names(self) -> Collection[str]:
        """The names of its tensors."""
        return read_names(self.path, revision=self.revision) if self.own_tensors is None else self.own_tensors.keys()

    def tensors(self, needs: Callable[[str], bool] | None = None) -> Mapping[str, Tensor]:
        """Its tensors, as `read_tensors` reads them."""
        if self.own_tensors is not None:
            return self.own_tensors
        return read_tensors(self.path, revision=self.revision, needs=needs)

    @property
    def target(self) -> TargetShape | None:
        """The target that its config names; None if it names none."""
        return TargetShape.of(self.config, self.path)
