"""A GGUF file as a model whose linear layers and embedding keep their blocks: nothing but norms and biases is unpacked.

Relied on in transformers (read in 5.23, run in 5.23): `modeling_gguf_pytorch_utils` has a processor for each
architecture, which undoes what llama.cpp's converter did to tensors, and `initialization.no_init_weights` leaves new
weights as they are. Both are private. Linear layers and embeddings make their weights by `torch.empty`, all else makes
numbers at once.
"""

import copy
import mmap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from outrider.core.place import CheckpointPlace
from outrider.lm.hf.anatomy import Anatomy, opener
from outrider.lm.hf.gguf import PLAIN, GgufHeader, GgufTensor, MadePlain, as_plain, header
from outrider.lm.weights.blocks import KINDS, BlockWeight
from outrider.lm.weights.linear import BlockEmbedding, BlockLinear, ScaledBlockEmbedding
from outrider.lm.weights.operators import has_kernels

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
        model = _empty(config, head.dtype, attn_implementation)
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
    def header(self) -> GgufHeader:
        """What the file says of itself."""
        assert self.place.file is not None
        return header(self.place.file)

    def read(self) -> tuple[PreTrainedModel, Mapping[str, Any]]:
        """The model with its weights, and what is to tell of its loading, as transformers tells it."""
        model, mismatched = self.model, list[tuple[str, Any, Any]]()
        processor = _processor(self.header, model.config)
        for tensor, content in self._contents():
            name = self.names[tensor.name]
            wanted = tuple(_weight(model, name).shape)
            if _holds_blocks(tensor):
                shape = tensor.shape
                if shape == wanted:
                    _place_blocks(model, name, BlockWeight.of_gguf(content, tensor.kind, self.orders.get(tensor.name)))
            else:
                values = _numbers(processor, tensor, content)
                shape = tuple(values.shape)
                if shape == wanted:
                    _place_numbers(model, name, values.to(self.header.dtype))
            if shape != wanted:
                mismatched.append((name, shape, wanted))
        _tie(model)
        left = [name for name, weight in model.named_parameters() if weight.is_meta]
        missing = set(left) - {name for name, _, _ in mismatched}
        return self._finished(), {
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


class _WithoutWeights(TorchFunctionMode):
    """Tensors that are made to be filled have shapes and no values."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.empty:
            return function(*args, **{**(kwargs or {}), "device": "meta"})
        return function(*args, **(kwargs or {}))


def _empty(config: PreTrainedConfig, dtype: torch.dtype, attn_implementation: str | None) -> PreTrainedModel:
    """A model without weights, whose buffers have their values."""
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    with _WithoutWeights(), no_init_weights():
        model: PreTrainedModel = opener(config).from_config(copy.deepcopy(config), dtype=dtype, **options)
    if unfilled := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
        raise MadePlain(f"{config.model_type} has buffers that are not known here, such as {unfilled[0]}")
    return model


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
    layer, weight = _layer(model, name)
    known = type(layer) in (nn.Linear, nn.Embedding) or (isinstance(layer, nn.Embedding) and _is_scaled(layer))
    if weight != "weight" or not known:
        raise MadePlain(f"{name} belongs to a {type(layer).__name__}, and blocks stay only in plain linear layers")


def _is_scaled(layer: nn.Module) -> bool:
    """Whether an embedding does nothing but multiply what it looks up, as Gemma's does."""
    return isinstance(layer._buffers.get("embed_scale"), Tensor)


def _layer(model: PreTrainedModel, name: str) -> tuple[nn.Module, str]:
    """The module that has a weight, and the weight's name in it."""
    path, _, weight = name.rpartition(".")
    return model.get_submodule(path), weight


def _weight(model: PreTrainedModel, name: str) -> Tensor:
    layer, weight = _layer(model, name)
    found: Tensor = getattr(layer, weight)
    return found


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


def _place_blocks(model: PreTrainedModel, name: str, weight: BlockWeight) -> None:
    """Put a layer that computes from blocks in the place of one without weights."""
    path, _, _ = name.rpartition(".")
    layer = model.get_submodule(path)
    if isinstance(layer, nn.Linear):
        model.set_submodule(path, BlockLinear(weight, None if layer.bias is None else layer.bias.detach()))
    elif _is_scaled(layer):
        model.set_submodule(path, ScaledBlockEmbedding(weight, dtype=model.dtype, embed_scale=layer.embed_scale))
    else:
        model.set_submodule(path, BlockEmbedding(weight, dtype=model.dtype))


def _place_numbers(model: PreTrainedModel, name: str, values: Tensor) -> None:
    layer, weight = _layer(model, name)
    if weight in layer._parameters:
        layer._parameters[weight] = nn.Parameter(values, requires_grad=False)
    else:
        layer._buffers[weight] = values


def _tie(model: PreTrainedModel) -> None:
    """Let the output layer have the embedding's weight where the file has one for both."""
    output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if type(output) is not nn.Linear or not output.weight.is_meta or not model.config.tie_word_embeddings:
        return
    if isinstance(embedding, BlockEmbedding):
        model.set_output_embeddings(BlockLinear(embedding.blocks, output.bias))
    else:
        output.weight = embedding.weight
