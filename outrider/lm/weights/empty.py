"""Models whose weights have shapes and no values yet, and how single weights get some.

Relied on in transformers (read in 5.23, run in 5.23): `initialization.no_init_weights` leaves new weights as they are.
It is private. Linear layers and embeddings make their weights by `torch.empty`, all else makes numbers at once.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from outrider.lm.hf.anatomy import opener
from outrider.lm.hf.gguf import MadePlain
from outrider.lm.weights.linear import BlockEmbedding, BlockLinear


def empty_model(config: PreTrainedConfig, dtype: torch.dtype, attn_implementation: str | None) -> PreTrainedModel:
    """A model without weights, whose buffers have their values.

    Raises:
        MadePlain: Some buffers would have none.
    """
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    with _WithoutWeights(), no_init_weights():
        model: PreTrainedModel = opener(config).from_config(copy.deepcopy(config), dtype=dtype, **options)
    if unfilled := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
        raise MadePlain(f"{config.model_type} has buffers that are not known here, such as {unfilled[0]}")
    return model


def layer_of(model: PreTrainedModel, name: str) -> tuple[nn.Module, str]:
    """The module that has a weight, and the weight's name in it."""
    path, _, weight = name.rpartition(".")
    return model.get_submodule(path), weight


def weight_of(model: PreTrainedModel, name: str) -> Tensor:
    """The weight of a name."""
    layer, weight = layer_of(model, name)
    found: Tensor = getattr(layer, weight)
    return found


def place_numbers(model: PreTrainedModel, name: str, values: Tensor) -> None:
    """Give a weight its values."""
    layer, weight = layer_of(model, name)
    if weight in layer._parameters:
        layer._parameters[weight] = nn.Parameter(values, requires_grad=False)
    else:
        layer._buffers[weight] = values


def tie(model: PreTrainedModel) -> None:
    """Let the output layer have the embedding's weight where the checkpoint has one for both."""
    output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if type(output) is not nn.Linear or not output.weight.is_meta or not model.config.tie_word_embeddings:
        return
    if isinstance(embedding, BlockEmbedding):
        model.set_output_embeddings(BlockLinear(embedding.blocks, output.bias))
    else:
        output.weight = embedding.weight


class _WithoutWeights(TorchFunctionMode):
    """Tensors that are made to be filled have shapes and no values."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.empty:
            return function(*args, **{**(kwargs or {}), "device": "meta"})
        return function(*args, **(kwargs or {}))
