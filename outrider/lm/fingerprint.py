"""Hashes of values by their whole contents: settings, source files, every byte of every weight.

Hashes of weights that were read from files are kept between processes; see `note_files`.
"""

import dataclasses
import hashlib
import json
import platform
import weakref
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from outrider.host.hashed import Stamp, kept, stamps_of

CHUNK = 1 << 24
"""Bytes of a tensor that are hashed at once, and copied to the host where it lies elsewhere."""
PLAIN = (type(None), bool, int, float, complex, str, bytes, Path, Enum, np.generic, torch.dtype, torch.device)

SETTINGS = ("vocab_size", "max_context", "max_slots", "device", "dtype", "pad_to", "forward", "stepwise")
"""Attributes of a language model that matter besides its modules; some models lack some."""


class Unreadable(Exception):
    """A value whose bytes cannot all be read."""


@runtime_checkable
class _AroundModules(Protocol):
    """A language model around torch modules: what its hash needs of the interface in `protocol`."""

    @property
    def modules(self) -> Mapping[str, nn.Module]: ...
    def extend(self, segments: Any, taps: Any = ()) -> Any: ...


@runtime_checkable
class _AroundModel(Protocol):
    """A language model around another one, as in `translated`."""

    lm: object
    translation: object


def note_files(module: nn.Module, files: Sequence[Path], began: int, *, how: str = "") -> None:
    """Keep hashes of a module's weights between processes, for as long as neither the files nor the weights change.

    Args:
        module: Its weights were just read from the files.
        files: Files that decide what the weights are.
        began: When reading began, in nanoseconds since the epoch. Files that were changed later are not trusted.
        how: What was done with the files' weights.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    plain = all(type(each) in (Tensor, nn.Parameter) and not each.is_inference() for _, each in tensors)
    try:
        stamps = stamps_of(files)
    except OSError:
        return
    if plain and stamps and all(changed < began for _, _, changed in stamps):
        group = _Read(stamps, tensors, how)
        for number, (_, tensor) in enumerate(tensors):
            _READ[tensor] = group, number


def read_from(module: nn.Module) -> dict[str, Any] | None:
    """The files that all weights of a module were read from, as values of JSON; None if they are not known, or weights
    have changed since.
    """
    by_id = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor not in _READ:
            return None
        group, number = _READ[tensor]
        if not group.holds(number):
            return None
        by_id[id(group)] = group
    [*groups] = by_id.values()
    return {"files": [stamp for group in groups for stamp in group.stamps], "what": [group.what for group in groups]}


class _Read:
    """Tensors that were read from files."""

    def __init__(self, stamps: Sequence[Stamp], tensors: Sequence[tuple[str, Tensor]], how: str) -> None:
        self.stamps, self._hashes = stamps, list[str]()
        self._tensors = [weakref.ref(each) for _, each in tensors]
        self._states = [_state(each) for _, each in tensors]
        described = [(name, type(each).__name__, each.dtype, each.shape) for name, each in tensors]
        self.what = hashlib.sha256(repr([transformers.__version__, how, described]).encode()).hexdigest()

    def holds(self, number: int) -> bool:
        """Whether a tensor is there, and has not changed."""
        tensor = self._tensors[number]()
        return tensor is not None and _state(tensor) == self._states[number]

    def hash_of(self, number: int) -> bytes | None:
        """The hash of a tensor; None if it has changed."""
        if not self.holds(number):
            return None
        if not self._hashes:
            if not all(map(self.holds, range(len(self._tensors)))):
                return None
            self._hashes = kept(
                self.stamps, self.what, lambda: [_hash_read(tensor()).hex() for tensor in self._tensors]
            )
        return bytes.fromhex(self._hashes[number])


_READ: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The tensors that were read from files: for each, with which others, and its number among them."""


def _state(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor lies, and how often it was changed in place."""
    return tensor.data_ptr(), tensor._version


def fingerprint(*values: object) -> str | None:
    """A hash that is equal for equal values only; None if not all bytes of a value can be read.

    Values are numbers, texts, collections, arrays, tensors, dataclasses (by the fields that they are compared by),
    configs, tokenizers, torch modules (by their weights and buffers), and language models around such modules.

    Example:
        >>> fingerprint(torch.zeros(2)) == fingerprint(torch.zeros(2)), fingerprint([1, 2]) == fingerprint([12])
        (True, False)
        >>> fingerprint(lambda: 3) is None
        True
    """
    try:
        return _hash(values).hex()[:32]
    except Unreadable:
        return None


def shape_of(model: PreTrainedModel) -> str:
    """A hash of what a model is without its weights: its class, dtype, config, and its packed layers with the kinds of
    their weights, wherever it was loaded from.
    """
    config = model.config.to_dict()
    for where in ("_name_or_path", "architectures", "dtype", "transformers_version"):
        config.pop(where, None)
    kinds = {
        name: f"{type(part).__name__} {kind}"
        for name, part in model.named_modules()
        if isinstance(kind := getattr(part, "kind", None), str)
    }
    described = json.dumps([type(model).__qualname__, str(model.dtype), config, kinds], sort_keys=True, default=str)
    return hashlib.sha256(described.encode()).hexdigest()


def weights_of(model: PreTrainedModel) -> str | None:
    """A hash of a model's weights and buffers; None if not all bytes can be read."""
    try:
        return fingerprint(str(model), _weights(model))
    except Unreadable:
        return None


def source(package: Path) -> dict[str, bytes]:
    """The hash of every file of source under a folder, by its place there."""
    files = sorted(package.rglob("*.py"))
    return {path.relative_to(package).as_posix(): hashlib.sha256(path.read_bytes()).digest() for path in files}


def machine(device: torch.device) -> list[object]:
    """Everything about this machine that changes roundings: instruction sets, threads, matrix settings, GPU."""
    properties: list[object] = [
        platform.machine(),
        platform.processor(),
        instruction_sets(Path("/proc/cpuinfo")),
        torch.backends.cpu.get_cpu_capability(),
        torch.backends.mkldnn.is_available(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
    ]
    if device.type == "cuda":
        properties += [torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device), torch.version.cuda]
        properties += [torch.backends.cudnn.version(), torch.backends.cuda.matmul.allow_tf32]
    return properties


def instruction_sets(info: Path) -> set[str]:
    """What Linux says that the processors can do; empty elsewhere."""
    lines = info.read_text().splitlines() if info.exists() else []
    return {line for line in lines if line.startswith(("flags", "Features"))}


def _hash(value: object) -> bytes:
    """The hash of a value."""
    if isinstance(value, Tensor) and value in _READ:
        group, number = _READ[value]
        if (known := group.hash_of(number)) is not None:
            return bytes(known)
    return _hash_read(value)


def _hash_read(value: object) -> bytes:
    """The hash of a value's kind and of its parts, each behind its length."""
    digest = hashlib.sha256()
    for part in (f"{type(value).__module__}.{type(value).__qualname__}".encode(), *_parts(value)):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _parts(value: object) -> Iterator[bytes]:
    """What a value consists of: bytes, or the hashes of smaller values."""
    if isinstance(value, PLAIN):
        yield repr(value).encode()
    elif isinstance(value, Tensor):
        yield from _tensor(value)
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield repr((value.dtype, value.shape)).encode()
        yield value.tobytes()
    elif isinstance(value, Mapping):
        yield from (_hash(pair) for pair in value.items())
    elif isinstance(value, Set):
        yield from sorted(map(_hash, value))
    elif isinstance(value, list | tuple):
        yield from map(_hash, value)
    else:
        yield from map(_hash, _insides(value))


def _insides(value: object) -> Sequence[object]:
    """The parts of an object that its behaviour depends on."""
    if isinstance(value, nn.Module):
        return [str(value), getattr(value, "config", None), _weights(value)]
    if isinstance(value, PreTrainedConfig):
        return [vars(value)]
    if isinstance(value, PreTrainedTokenizerBase) and hasattr(value, "backend_tokenizer"):
        return [value.backend_tokenizer.to_str(), value.special_tokens_map]
    if isinstance(value, _AroundModel):
        return [value.lm, value.translation]
    if isinstance(value, _AroundModules) and value.modules:
        return [dict(value.modules), {name: getattr(value, name, None) for name in SETTINGS}]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value) if field.compare]
    if callable(describe := getattr(value, "to_dict", None)):
        return [describe()]
    raise Unreadable(type(value).__qualname__)


def _weights(module: nn.Module) -> dict[str, object]:
    """All parameters and buffers, and what torch's own quantised layers keep beside them.

    Layers of other libraries are not asked for their `state_dict`, because asking may change them: bitsandbytes rounds
    its scales anew.
    """
    tensors: dict[str, object] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, part in module.named_modules():
        kind = type(part)
        if kind._save_to_state_dict is not nn.Module._save_to_state_dict:
            if not kind.__module__.startswith("torch."):
                raise Unreadable(kind.__qualname__)
            tensors[f"{name} as saved"] = part.state_dict()
    return tensors


def _tensor(tensor: Tensor) -> Iterator[bytes]:
    """Type, shape and every byte; of tensors around other ones, those of the inner ones."""
    yield repr((tensor.dtype, tensor.shape)).encode()
    if hasattr(tensor, "__tensor_flatten__"):
        names, around = tensor.__tensor_flatten__()
        yield repr(around).encode()
        yield from (_hash(getattr(tensor, name)) for name in names)
    elif tensor.is_quantized:
        yield _hash(tensor.int_repr())
        scales = (tensor.q_per_channel_scales, tensor.q_per_channel_zero_points, tensor.q_per_channel_axis)
        single = (tensor.q_scale, tensor.q_zero_point)
        yield from (_hash(read()) for read in (scales if "channel" in str(tensor.qscheme()) else single))
    elif tensor.layout == torch.strided and tensor.device.type != "meta":
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        with ThreadPoolExecutor() as threads:
            yield from threads.map(_bytes, flat.split(CHUNK))
    else:
        raise Unreadable(f"a tensor of layout {tensor.layout} on {tensor.device}")


def _bytes(chunk: Tensor) -> bytes:
    return hashlib.sha256(chunk.cpu().numpy().data).digest()
