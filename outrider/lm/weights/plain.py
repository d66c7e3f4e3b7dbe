"""Models that compute from blocks, why some cannot, and copies of them that have plain weights."""

import copy
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.open import reason_of
from outrider.lm.weights.blocks import BlockWeight
from outrider.lm.weights.linear import BlockEmbedding, BlockLinear, Int8Linear, ScaledBlockEmbedding
from outrider.lm.weights.operators import block_rows, has_kernels, rounded


class ScaledEmbedding(nn.Embedding):
    """An embedding that is multiplied by a number, as Gemma's is."""

    embed_scale: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.embed_scale.to(self.weight.dtype)


class RoundedLinear(nn.Linear):
    """A linear layer that rounds the states which it multiplies to 8 bits, as `Int8Linear` does."""

    def forward(self, input: Float[Tensor, "*batch in_features"]) -> Float[Tensor, "*batch out_features"]:
        return super().forward(rounded(input).to(self.weight.dtype))

    def cut(self, rows: Sequence[int]) -> "RoundedLinear":
        """A layer of some of its rows, in this order."""
        picked = torch.tensor(list(rows), device=self.weight.device)
        short = RoundedLinear(self.in_features, len(rows), bias=self.bias is not None, device="meta")
        short.weight = nn.Parameter(self.weight[picked], requires_grad=False)
        if self.bias is not None:
            short.bias = nn.Parameter(self.bias[picked], requires_grad=False)
        return short


def has_blocks(module: nn.Module) -> bool:
    """Whether any layer computes from blocks."""
    return any(isinstance(part, BlockLinear | BlockEmbedding) for part in module.modules())


def rounds_activations(module: nn.Module) -> bool:
    """Whether any layer rounds the states that it multiplies to 8 bits."""
    return any(isinstance(part, Int8Linear | RoundedLinear) for part in module.modules())


def num_packed(module: nn.Module) -> int:
    """Weights that stay packed in a module's layers. Those that layers share count once."""
    layers = [part for part in module.modules() if isinstance(part, BlockLinear | BlockEmbedding)]
    matrices = {id(layer.blocks.data): layer.blocks for layer in layers}
    return sum(matrix.out_features * matrix.in_features for matrix in matrices.values())


@torch.no_grad()
def why_plain(model: PreTrainedModel) -> str | None:
    """Why a model with packed layers cannot compute with them, found by reading two tokens; None if it can.

    Some code reads the `weight` of a linear layer, which packed ones do not have.
    """
    name = model.config.model_type
    if not has_kernels():
        return "there is no C++ compiler for their products"
    if Anatomy.of(model).recurrent:
        return f"{name} has recurrent layers"
    try:
        model(input_ids=torch.tensor([[0, 1]]), use_cache=False)
    except Exception as error:
        return f"the code of {name} does not compute with packed layers: {reason_of(error)}"
    return None


def copied(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy of a model, perhaps in another dtype, all of whose layers have plain weights. Those that round states to 8
    bits do so still.
    """
    layers = [part for part in model.modules() if isinstance(part, BlockLinear | BlockEmbedding)]
    # Nobody needs a copy of the blocks.
    shared = {id(tensor): tensor for layer in layers for tensor in layer.buffers() if not tensor.is_floating_point()}
    twin: PreTrainedModel = copy.deepcopy(model, dict(shared))
    weights = dict[int, nn.Parameter]()
    for path, layer in list(twin.named_modules(remove_duplicate=False)):
        if isinstance(layer, BlockLinear | BlockEmbedding):
            key = id(layer.blocks.data)
            if key not in weights:
                weights[key] = nn.Parameter(_numbers(layer.blocks, dtype), requires_grad=False)
            twin.set_submodule(path, _plain(layer, weights[key]))
    # Some buffers have a dtype of their own.
    return twin if dtype == model.dtype else twin.to(dtype)


def _numbers(weight: BlockWeight, dtype: torch.dtype) -> Float[Tensor, "rows features"]:
    """All weights of a matrix."""
    wide = torch.promote_types(dtype, torch.float32)
    return block_rows(torch.arange(weight.out_features), weight, wide).to(dtype)


def _plain(layer: BlockLinear | BlockEmbedding, weight: nn.Parameter) -> nn.Module:
    """The layer of torch that computes the same from plain weights."""
    outputs, inputs = weight.shape
    if isinstance(layer, BlockEmbedding):
        kind = ScaledEmbedding if isinstance(layer, ScaledBlockEmbedding) else nn.Embedding
        embedding = kind(outputs, inputs, device="meta")
        embedding.weight = weight
        if isinstance(layer, ScaledBlockEmbedding):
            embedding.register_buffer("embed_scale", layer.embed_scale, persistent=False)
        return embedding
    of_states = RoundedLinear if isinstance(layer, Int8Linear) else nn.Linear
    linear = of_states(inputs, outputs, bias=layer.bias is not None, device="meta")
    linear.weight = weight
    if layer.bias is not None:
        linear.bias = nn.Parameter(layer.bias, requires_grad=False)
    return linear
