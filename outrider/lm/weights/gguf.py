"""A GGUF file as a model whose linear layers and embedding keep their blocks: nothing but norms and biases is unpacked.

Relied on in transformers (read in 5.23, run in 5.23): `modeling_gguf_pytorch_utils` has a processor for each
architecture, which undoes what llama.cpp's converter did to tensors. It is private.
"""

import mmap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from outrider.core.place import CheckpointPlace
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.gguf import PLAIN, GgufHeader, GgufTensor, MadePlain, as_plain, header
from outrider.lm.weights.blocks import KINDS, BlockWeight
from outrider.lm.weights.empty import empty_model, layer_of, place_numbers, tie, weight_of
from outrider.lm.weights.linear import can_hold_blocks, place_blocks
from outrider.lm.weights.operators import has_kernels
from outrider.lm.weights.plain import why_plain

AT_ONCE = 1 << 27
"""Bytes of a file that are read before their pages are given back."""


@dataclass(frozen=True, kw_only=True)
class BlockModel:
    """A model that keeps a file's blocks, before the file's tensors are read.

    Attributes:
        place: Where the file is.
        model: The model; its weights have shapes and no values.
        names: The name of the weight that each tensor of the file is.
        orders: For tensors whose rows llama.cpp has moved, the row of the file that each row of the weight is.
    """

    place: CheckpointPlace
    model: PreTrainedModel
    names: Mapping[str, str]
    orders: Mapping[str, Int[Tensor, " rows"]]

    @classmethod
    def of(
        cls, place: CheckpointPlace, config: PreTrainedConfig, attn_implementation: str | None = None
    ) -> "BlockModel":
        """The model of a file.

        Args:
            attn_implementation: How attention is computed; None leaves it to transformers.

        Raises:
            MadePlain: Its blocks cannot stay as they are.
        """
        assert place.file is not None
        head = header(place.file)
        kinds = head.sizes.keys() - PLAIN.keys()
        if not kinds:
            raise MadePlain("it has no blocks")
        if unknown := sorted(kinds - KINDS.keys()):
            raise MadePlain(f"no layer computes from blocks of kind {', '.join(unknown)}")
        if not has_kernels():
            raise MadePlain("there is no C++ compiler for their products")
        if Anatomy.of(config).recurrent:
            raise MadePlain(f"{config.model_type} has recurrent layers")
        model = empty_model(config, head.dtype, attn_implementation)
        processor = _processor(head, config)
        names = _names(model, head)
        orders = {}
        for tensor in head.tensors:
            if tensor.name in names and _holds_blocks(tensor):
                _check_layer(model, names[tensor.name])
                if (order := _order(processor, tensor)) is not None:
                    orders[tensor.name] = order
        return cls(place=place, model=model, names=names, orders=orders)

    @property
    def size(self) -> int:
        """About its bytes in memory."""
        return sum(self.header.sizes.values())

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return self.header.dtype

    @property
    def blocks(self) -> str:
        """The kinds of blocks with their sizes, for a sentence."""
        return self.header.blocks

    @property
    def header(self) -> GgufHeader:
        """What the file says of itself."""
        assert self.place.file is not None
        return header(self.place.file)

    def read(self) -> tuple[PreTrainedModel, Mapping[str, Any]]:
        """The model with its weights, and what is to tell of its loading, as transformers tells it.

        Raises:
            MadePlain: Its code does not compute from blocks.
        """
        model, mismatched = self.model, list[tuple[str, Any, Any]]()
        processor = _processor(self.header, model.config)
        for tensor, content in self._contents():
            name = self.names[tensor.name]
            wanted = tuple(weight_of(model, name).shape)
            if _holds_blocks(tensor):
                shape = tensor.shape
                if shape == wanted:
                    weight = BlockWeight.of_gguf(content, tensor.kind, self.orders.get(tensor.name))
                    place_blocks(model, name.removesuffix(".weight"), weight)
            else:
                values = _numbers(processor, tensor, content)
                shape = tuple(values.shape)
                if shape == wanted:
                    place_numbers(model, name, values.to(self.header.dtype))
            if shape != wanted:
                mismatched.append((name, shape, wanted))
        tie(model)
        left = [name for name, weight in model.named_parameters() if weight.is_meta]
        missing = set(left) - {name for name, _, _ in mismatched}
        model = self._finished().eval()
        if not missing and not mismatched and (reason := why_plain(model)) is not None:
            raise MadePlain(reason)
        return model, {
            "missing_keys": missing,
            "unexpected_keys": set(),
            "mismatched_keys": set(mismatched),
        }

    def _contents(self) -> Iterator[tuple[GgufTensor, UInt8[np.ndarray, "rows bytes"]]]:
        """The tensors that the model has, each with its bytes, which are mapped from the file for a moment."""
        assert self.place.file is not None
        with open(self.place.file, "rb") as opened:
            # Torch wants memory that may be written.
            content = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        read = 0
        for tensor in self.header.tensors:
            if tensor.name not in self.names:
                continue
            rows = 1 if len(tensor.shape) < 2 else int(np.prod(tensor.shape[:-1]))
            yield tensor, np.frombuffer(content, np.uint8, tensor.size, tensor.begin).reshape(rows, -1)
            read += tensor.size
            if read >= AT_ONCE and hasattr(mmap, "MADV_DONTNEED"):
                content.madvise(mmap.MADV_DONTNEED)
                read = 0

    def _finished(self) -> PreTrainedModel:
        """The model with the generation config of its file and of the folder around it."""
        # Most files stand alone, and transformers has made one of what the header says.
        with suppress(OSError, ValueError):
            self.model.generation_config = GenerationConfig.from_pretrained(self.place.folder)
        return as_plain(self.model, self.place)


def _processor(head: GgufHeader, config: PreTrainedConfig) -> Any:
    """What undoes the changes of llama.cpp's converter for an architecture."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    return TENSOR_PROCESSORS.get(head.architecture, TensorProcessor)(config=config.to_dict())


def _names(model: PreTrainedModel, head: GgufHeader) -> dict[str, str]:
    """The name of the weight that each tensor of the file is."""
    import gguf

    kinds = [kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == head.architecture]
    if not kinds:
        raise MadePlain(f"the names of the tensors of {head.architecture} are not known here")
    known = gguf.get_tensor_name_map(kinds[0], Anatomy.of(model).num_layers)
    inside, names = {tensor.name for tensor in head.tensors}, dict[str, str]()
    tied = model.get_output_embeddings() if model.config.tie_word_embeddings else None
    for name, weight in model.named_parameters(remove_duplicate=False):
        tensor = known.get_name(name, try_suffixes=(".weight", ".bias"))
        if tensor in inside:
            names[tensor] = name
        elif weight is not getattr(tied, "weight", None):
            raise MadePlain(f"{name} is under no name that is known here")
    return names


def _holds_blocks(tensor: GgufTensor) -> bool:
    return tensor.kind not in PLAIN and len(tensor.shape) > 1


def _check_layer(model: PreTrainedModel, name: str) -> None:
    """Raise MadePlain if a weight is not the one of a layer that can have blocks."""
    layer, weight = layer_of(model, name)
    if weight != "weight" or not can_hold_blocks(layer):
        raise MadePlain(f"{name} belongs to a {type(layer).__name__}, and blocks stay only in plain linear layers")


def _order(processor: Any, tensor: GgufTensor) -> Int[Tensor, " rows"] | None:
    """For each row of a weight, the row of the file that it is; None where all stay in their places.

    Raises:
        MadePlain: The weight is more than the file's rows in another order.
    """
    rows, columns = tensor.shape[0], 2
    if len(tensor.shape) != 2:
        raise MadePlain(f"{tensor.name} is no matrix, and blocks stay only in plain linear layers")
    numbered = np.arange(rows * columns).reshape(rows, columns)
    try:
        moved = processor.process(weights=numbered, name=tensor.name, tensor_key_mapping={}, parsed_parameters={})
        order = np.asarray(moved.weights)[:, 0] // columns
        kept = moved.name == tensor.name and np.array_equal(moved.weights, numbered[order])
    except (ValueError, IndexError, KeyError, TypeError, AttributeError):
        kept = False
    if not kept:
        raise MadePlain(f"transformers turns {tensor.name} into something else than its rows in another order")
    return None if np.array_equal(order, np.arange(rows)) else torch.from_numpy(order)


def _numbers(processor: Any, tensor: GgufTensor, content: UInt8[np.ndarray, "rows bytes"]) -> Tensor:
    """The numbers of a tensor, as transformers takes them out of a file."""
    import gguf

    numbers = gguf.quants.dequantize(content, gguf.GGMLQuantizationType[tensor.kind]).reshape(tensor.shape)
    done = processor.process(weights=numbers, name=tensor.name, tensor_key_mapping={}, parsed_parameters={})
    # A copy, because the file is mapped for a moment.
    return torch.from_numpy(np.array(done.weights))
