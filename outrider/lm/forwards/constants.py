"""The constants of a compiled library: kept once by their content, and mapped from there instead of read.

Relied on in torch (read and run in 2.13): with `package_constants_on_disk_format` `binary_blob` the compiler writes all
constants into one file, each at a multiple of 64 bytes, in the order of the lines `constants_info_[i].field = value;`
of its C++ source, which say what they are. A library made so holds none, and reads those that it is given.
"""

import json
import mmap
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from outrider.core import files

INDEX, STORE = "constants.json", "constants"
"""The file beside a library that lists its constants, and the folder beside all libraries' folders that holds them."""
ALIGNMENT = 64
"""Bytes, of which each constant begins at a multiple."""
LARGE = 1 << 18
"""Bytes of a constant from which it has a file of its own, which other libraries with the same constant share."""
_FIELD = re.compile(r"constants_info_\[(\d+)\]\.(\w+) = ([^;]*);")


@dataclass(frozen=True, kw_only=True)
class Constant:
    """One constant of a library.

    Attributes:
        name: What the library calls it.
        shape: Its sizes.
        stride: Its strides, in elements.
        offset: Where it begins in its storage, in elements.
        size: Bytes of its storage.
        opaque: How oneDNN lays it out, as hexadecimal digits; empty for plain tensors.
        own: The module's own tensor that has these bytes; None if they lie in a file.
        file: The file: the SHA-256 of its content.
        start: Where the storage begins in the file, in bytes.
    """

    name: str
    shape: Sequence[int]
    stride: Sequence[int]
    offset: int
    size: int
    opaque: str = ""
    own: str | None = None
    file: str = ""
    start: int = 0


def tensors_of(parts: Sequence[nn.Module]) -> dict[str, Tensor]:
    """The plain parameters and buffers of some modules, by names that are alike in every process."""
    tensors: dict[str, Tensor] = {}
    for number, part in enumerate(parts):
        for name, tensor in [*part.named_parameters(), *part.named_buffers()]:
            if tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes():
                tensors[f"{number}.{name}"] = tensor.detach()
    return tensors


def keep(source: str, blob: Path, store: Path, module_tensors: Mapping[str, Tensor]) -> list[Constant]:
    """Keep the constants of a library that was just made, except those that are a module's own tensors.

    Args:
        source: The compiler's C++ source.
        blob: The file of all constants.
        store: Where constants are kept, each content once.
        module_tensors: The module's tensors by their names.

    Raises:
        OSError: They cannot be written.
    """
    content = np.memmap(blob, dtype=np.uint8, mode="r") if blob.stat().st_size else np.zeros(0, np.uint8)
    files.make_folder(store)
    kept, small, parts, at = list[Constant](), list[Constant](), list[np.ndarray[Any, Any]](), 0
    for constant in _described(source):
        part, at = content[at : at + constant.size], at + padded(constant.size)
        if not constant.opaque and (name := _same(part, module_tensors)) is not None:
            kept.append(replace(constant, own=name))
        elif constant.size >= LARGE:
            kept.append(replace(constant, file=_store(part, store)))
        elif constant.size:
            small.append(replace(constant, start=sum(each.size for each in parts)))
            parts.append(np.pad(part, (0, padded(constant.size) - constant.size)))
        else:
            raise RuntimeError(f"its constant {constant.name} is empty")
    if at != content.size:
        raise RuntimeError(f"the compiler wrote {content.size} bytes of constants, and lists {at}")
    if small:
        file = _store(np.concatenate(parts), store)
        kept += [replace(each, file=file) for each in small]
    return kept


def padded(size: int) -> int:
    """Bytes from the beginning of a constant of this size to that of the next one."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def as_index(constants: Iterable[Constant]) -> bytes:
    """The content of an index."""
    return json.dumps([asdict(each) for each in constants], indent=1).encode()


def read(index: Path) -> list[Constant]:
    """The constants that an index lists.

    Raises:
        OSError: It cannot be read.
        ValueError: It is damaged.
    """
    try:
        return [Constant(**each) for each in json.loads(files.read(index))]
    except (TypeError, RecursionError) as error:
        raise ValueError(f"{index} is damaged") from error


class MappedConstants:
    """The bytes of constants, mapped from their files: they take no memory but that of pages that are read, and all
    processes share these pages.

    Args:
        constants: The constants.
        store: Where they are kept.
        module_tensors: The module's tensors by their names.

    Raises:
        OSError: A file is not there.
        ValueError: A file is empty.
        KeyError: The module has no such tensor.
    """

    def __init__(self, constants: Sequence[Constant], store: Path, module_tensors: Mapping[str, Tensor]) -> None:
        self.constants = constants
        self._held: dict[str, np.ndarray[Any, Any] | Tensor] = {}
        for each in constants:
            if each.own is not None:
                self._held[f"{each.own} of the model"] = module_tensors[each.own]
            elif each.file not in self._held:
                with (store / each.file).open("rb") as file:
                    # What a forward would write is written into a copy of the page.
                    self._held[each.file] = np.frombuffer(
                        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=np.uint8
                    )

    def address(self, constant: Constant) -> int:
        """Where the constant's storage lies in memory. It stays there as long as this object lives."""
        held = self._held[constant.file if constant.own is None else f"{constant.own} of the model"]
        begin = held.data_ptr() if isinstance(held, Tensor) else held.ctypes.data
        return int(begin) + constant.start


def _described(source: str) -> list[Constant]:
    """The constants that the compiler's source describes, in their order."""
    fields: dict[int, dict[str, str]] = {}
    for number, name, value in _FIELD.findall(source):
        fields.setdefault(int(number), {})[name] = value
    return [
        Constant(
            name=each["name"].strip('"'),
            shape=_numbers(each["shape"]),
            stride=_numbers(each["stride"]),
            offset=int(each["offset"]),
            size=int(each["data_size"]),
            opaque=bytes(_numbers(each.get("opaque_metadata", "{}"))).hex(),
        )
        for _, each in sorted(fields.items())
    ]


def _numbers(text: str) -> tuple[int, ...]:
    """The numbers of a list in C++."""
    return tuple(int(word.rstrip("L")) for word in text.strip("{} ").split(",") if word.strip())


def _same(part: "np.ndarray[Any, Any]", module_tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor that has these bytes; None if none has, or they are few."""
    if part.size < LARGE:
        return None
    for name, tensor in module_tensors.items():
        if tensor.nbytes == part.size and np.array_equal(tensor.reshape(-1).view(torch.uint8).numpy(), part):
            return name
    return None


def _store(part: "np.ndarray[Any, Any]", store: Path) -> str:
    """Write bytes under their hash, if they are not there. Returns the hash."""
    name = sha256(part.data).hexdigest()
    file = store / name
    if not file.is_file() or file.stat().st_size != part.size:
        files.replace(file, part.tobytes(), mode=0o600)
    return name
