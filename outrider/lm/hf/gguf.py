"""GGUF files: what their headers say, and models and tokenizers from them.

transformers reads them and makes plain weights of their blocks. It reads headers with the library `gguf`, which takes
fifteen seconds for a vocabulary of 150,000 tokens; see `quick_headers`. What a line of text needs is read here.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import copy
import importlib.util
import mmap
import struct
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, GgufConfig, PreTrainedConfig, PreTrainedModel

from outrider.core.inputs import needs
from outrider.core.place import CheckpointPlace
from outrider.core.types import InputError
from outrider.lm.hf import unpacked

LIBRARIES = ("gguf", "accelerate")
"""What transformers needs to read a GGUF file."""
NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""The kinds of numbers in a header, by their codes."""
TEXT, LIST = 8, 9
"""The codes of texts and of lists."""
PLAIN = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""The kinds of tensors that hold numbers rather than blocks."""
ENDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
"""The keys of tokens that end a text, a turn or a message."""
PAD = "tokenizer.ggml.padding_token_id"
"""The key of the token that fills up rows."""


class MadePlain(Exception):
    """Why the blocks of a file become plain weights, although they could have stayed as they are."""


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """Where a tensor lies in a GGUF file.

    Attributes:
        name: llama.cpp's name.
        kind: The kind of its blocks or numbers, such as `Q4_K`.
        shape: Its shape as torch counts, the innermost dimension last.
        begin: The first of its bytes in the file.
        size: Its bytes.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    begin: int
    size: int


@dataclass(frozen=True, kw_only=True)
class GgufHeader:
    """What a GGUF file says of itself.

    Attributes:
        values: Its numbers and texts by key; lists are left out.
        tensors: Its tensors.
    """

    values: Mapping[str, Any]
    tensors: Sequence[GgufTensor]

    @property
    def num_parameters(self) -> int:
        """Numbers in all tensors."""
        return sum(prod(tensor.shape) for tensor in self.tensors)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of each kind of block, the largest first."""
        sizes: Counter[str] = Counter()
        for tensor in self.tensors:
            sizes[tensor.kind] += tensor.size
        return dict(sizes.most_common())

    @property
    def architecture(self) -> str:
        """What llama.cpp calls the architecture."""
        return str(self.values.get("general.architecture", "unknown"))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights; bfloat16 where they are blocks."""
        if not self.sizes.keys() <= PLAIN.keys():
            return torch.bfloat16
        # Norms are float32 in every file.
        return next((dtype for name, dtype in PLAIN.items() if name in self.sizes), torch.bfloat16)

    @property
    def blocks(self) -> str:
        """The kinds of blocks with their sizes, for a sentence."""
        return ", ".join(f"{name} {size / 1e6:.3g} MB" for name, size in self.sizes.items())

    @property
    def ends(self) -> list[int]:
        """The tokens that end an answer."""
        ids = [self.values[key] for key in ENDS if isinstance(self.values.get(key), int)]
        return list(dict.fromkeys(ids))


def header(file: Path) -> GgufHeader:
    """The header of a GGUF file. Raises InputError if it cannot be read, or a library for such files is missing."""
    check_libraries(file)
    seen = file.stat()
    return _header(file, seen.st_size, seen.st_mtime_ns)


def check_libraries(file: Path) -> None:
    """Raise InputError if transformers cannot read GGUF files here."""
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise needs(f"the GGUF file {file}", " and ".join(missing), "gguf")


def gguf_config(place: CheckpointPlace) -> PreTrainedConfig:
    """The config that a GGUF file's header stands for, in the dtype of its weights. Raises what transformers raises."""
    file = place.file
    assert file is not None
    dtype = header(file).dtype
    began, kept = time.time_ns(), unpacked.kept(file, "config")
    if kept is None:
        seen = file.stat()
        config = _config(place.folder, str(place.gguf), seen.st_size, seen.st_mtime_ns)
        kept = unpacked.keep(file, "config", config.save_pretrained, began)
    own_config = copy.deepcopy(config) if kept is None else AutoConfig.from_pretrained(kept)
    own_config.name_or_path, own_config.dtype = place.name, dtype
    return own_config


def dequantised() -> GgufConfig:
    """What tells transformers to make plain weights of all blocks."""
    return GgufConfig(dequantize=True)


def as_plain(model: PreTrainedModel, place: CheckpointPlace) -> PreTrainedModel:
    """A model whose blocks became plain weights, as a model that never had any: it can be trained, saved and moved."""
    assert place.file is not None
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        vars(model).pop(name, None)
    for config in (model.config, model.config.get_text_config(decoder=True)):
        vars(config).pop("quantization_config", None)
        # The title of the file.
        vars(config).pop("_model_name_or_path", None)
    model.config.name_or_path = model.name_or_path = place.name
    ends = header(place.file).ends
    if model.generation_config is not None and len(ends) > 1:
        model.generation_config.eos_token_id = ends
    return model


@lru_cache(maxsize=8)
def _config(folder: str, file: str, size: int, changed: int) -> PreTrainedConfig:
    """The config of a file of this size, last changed at this time."""
    with quick_headers():
        return AutoConfig.from_pretrained(folder, gguf_file=file)


@contextmanager
def quick_headers() -> Iterator[None]:
    """Let transformers read the headers of GGUF files several times as fast: each number and each text of a header is a
    view of a plain array. The reader of the library `gguf` makes three views of a `numpy.memmap` for each.
    """
    import gguf

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        """Reads what the library's own reader does."""

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: str | None = None) -> np.ndarray:
            order = self.byte_order if override_order is None else override_order
            values = np.frombuffer(self.data, dtype, int(count), int(offset))
            return values if order == "I" else values.view(values.dtype.newbyteorder(order))

    own, gguf.GGUFReader = gguf.GGUFReader, Reader
    try:
        yield
    finally:
        gguf.GGUFReader = own


@lru_cache(maxsize=8)
def _header(file: Path, size: int, changed: int) -> GgufHeader:
    """The header of a file of this size, last changed at this time."""
    try:
        with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            read = _Reader(content).header()
    except (struct.error, ValueError, KeyError, OverflowError) as error:
        raise InputError(f"the header of {file} cannot be read; the file is damaged, so get it again") from error
    cut = [each.name for each in read.tensors if each.begin + each.size > size]
    if cut:
        raise InputError(f"{file} ends before {len(cut)} of its tensors, such as {cut[0]}, do; get the whole file")
    return read


@dataclass(kw_only=False)
class _Reader:
    """Reads a header from its beginning to its end.

    Attributes:
        content: The file.
        position: The next byte.
    """

    content: mmap.mmap
    position: int = 4

    def header(self) -> GgufHeader:
        """What the file says of itself."""
        from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType

        version = self.number("<I")
        if version not in (2, 3):
            raise ValueError(f"version {version}")
        num_tensors, num_values = self.number("<Q"), self.number("<Q")
        values: dict[str, Any] = {}
        for _ in range(num_values):
            key, value = self.text(), self.value(self.number("<I"))
            if value is not None:
                values[key] = value
        tensors = []
        for _ in range(num_tensors):
            name = self.text()
            shape = tuple(self.number("<Q") for _ in range(self.number("<I")))[::-1]
            kind = GGMLQuantizationType(self.number("<I"))
            per_block, in_bytes = GGML_QUANT_SIZES[kind]
            size = prod(shape) // per_block * in_bytes
            tensors.append(GgufTensor(name=name, kind=kind.name, shape=shape, begin=self.number("<Q"), size=size))
        alignment = int(values.get("general.alignment", GGUF_DEFAULT_ALIGNMENT))
        # Where tensors lie is counted from the end of the header.
        first = -(-self.position // alignment) * alignment
        return GgufHeader(values=values, tensors=[replace(each, begin=first + each.begin) for each in tensors])

    def number(self, code: str) -> Any:
        """The next number."""
        [value] = struct.unpack_from(code, self.content, self.position)
        self.position += struct.calcsize(code)
        return value

    def text(self) -> str:
        """The next text."""
        size = self.number("<Q")
        first, self.position = self.position, self.position + size
        if self.position > len(self.content):
            raise ValueError("a text ends behind the file")
        return self.content[first : self.position].decode(errors="replace")

    def value(self, kind: int) -> Any:
        """The next value; None for a list."""
        if kind == TEXT:
            return self.text()
        if kind != LIST:
            return self.number(NUMBERS[kind])
        of, count = self.number("<I"), self.number("<Q")
        if of in NUMBERS:
            self.position += count * struct.calcsize(NUMBERS[of])
        elif of == TEXT:
            self._pass_texts(count)
        else:
            for _ in range(count):
                self.value(of)
        return None

    def _pass_texts(self, count: int) -> None:
        """Go behind texts: a vocabulary has some hundred thousand."""
        content, position, size_at = self.content, self.position, struct.Struct("<Q").unpack_from
        for _ in range(count):
            position += 8 + size_at(content, position)[0]
        if position > len(content):
            raise ValueError("a text ends behind the file")
        self.position = position
