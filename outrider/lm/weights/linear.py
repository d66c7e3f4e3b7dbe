"""Layers whose weights stay packed."""

from collections.abc import Sequence
from typing import TypeGuard

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.lm.weights.blocks import KINDS, BlockWeight
from outrider.lm.weights.operators import block_linear, block_rows, int8_linear


class _Packed(nn.Module):
    """A layer with a matrix of packed weights.

    Attributes:
        kind: The format of its blocks.
        data: Its panels, a buffer. Layers with tied weights have the same one.
    """

    data: UInt8[Tensor, "panels bytes"]

    def __init__(self, weight: BlockWeight) -> None:
        super().__init__()
        self.kind, self._shape = weight.kind, (weight.out_features, weight.in_features)
        self.register_buffer("data", weight.data)

    @property
    def blocks(self) -> BlockWeight:
        """The matrix."""
        out_features, in_features = self._shape
        return BlockWeight(kind=self.kind, out_features=out_features, in_features=in_features, data=self.data)


class BlockLinear(_Packed):
    """A linear layer with packed weights. States and outputs have the same dtype.

    Example:
        >>> import numpy as np
        >>> layer = BlockLinear(BlockWeight.of_gguf(np.zeros((3, 18), dtype=np.uint8), "Q4_0"), torch.ones(3))
        >>> layer(torch.ones(1, 32))
        tensor([[1., 1., 1.]])
    """

    bias: Float[Tensor, " out_features"] | None

    def __init__(self, weight: BlockWeight, bias: Float[Tensor, " out_features"] | None = None) -> None:
        super().__init__(weight)
        self.register_buffer("bias", bias)

    @staticmethod
    def takes(layer: nn.Linear) -> bool:
        """Whether `of` copies a layer."""
        return layer.weight.dtype == torch.bfloat16 and layer.in_features % KINDS["BF16"].weights == 0

    @classmethod
    def of(cls, layer: nn.Linear) -> "BlockLinear":
        """A copy of a plain layer in bfloat16, whose rows are whole groups of weights."""
        weight = BlockWeight.of_gguf(layer.weight.detach().contiguous().view(torch.uint8), "BF16")
        return cls(weight, None if layer.bias is None else layer.bias.detach())

    @property
    def in_features(self) -> int:
        """Numbers of a state."""
        return self._shape[1]

    @property
    def out_features(self) -> int:
        """Numbers of an output."""
        return self._shape[0]

    def forward(self, states: Float[Tensor, "*batch in_features"]) -> Float[Tensor, "*batch out_features"]:
        """The outputs for some states."""
        return block_linear(states, [self.blocks], self.bias)

    def cut(self, rows: Sequence[int]) -> "BlockLinear":
        """A layer of some of its rows, in this order, each with the blocks that it has here."""
        picked = torch.tensor(list(rows), device=self.data.device)
        return type(self)(self.blocks.cut(picked), None if self.bias is None else self.bias[picked])

    def extra_repr(self) -> str:
        """Its sizes, for printing."""
        return f"in_features={self.in_features}, out_features={self.out_features}, kind={self.kind}"


class Int8Linear(BlockLinear):
    """A linear layer with packed weights that rounds the states which it multiplies to 8 bits, as `rounded` does."""

    def forward(self, states: Float[Tensor, "*batch in_features"]) -> Float[Tensor, "*batch out_features"]:
        """The outputs for some states."""
        return int8_linear(states, [self.blocks], self.bias)


class BlockEmbedding(_Packed):
    """An embedding with packed weights.

    Attributes:
        dtype: Of its outputs.
    """

    def __init__(self, weight: BlockWeight, dtype: torch.dtype) -> None:
        super().__init__(weight)
        self.dtype = dtype

    @property
    def num_embeddings(self) -> int:
        """Tokens."""
        return self._shape[0]

    @property
    def embedding_dim(self) -> int:
        """Numbers of a token's row."""
        return self._shape[1]

    def forward(self, ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch embedding_dim"]:
        """The rows of some tokens."""
        return block_rows(ids, self.blocks, self.dtype)

    def extra_repr(self) -> str:
        """Its sizes, for printing."""
        return f"{self.num_embeddings}, {self.embedding_dim}, kind={self.kind}"


class ScaledBlockEmbedding(BlockEmbedding):
    """An embedding with packed weights whose rows are multiplied by a number, as Gemma's are.

    Attributes:
        embed_scale: The number.
    """

    embed_scale: Float[Tensor, ""]

    def __init__(self, weight: BlockWeight, dtype: torch.dtype, embed_scale: Float[Tensor, ""]) -> None:
        super().__init__(weight, dtype)
        self.register_buffer("embed_scale", embed_scale, persistent=False)

    def forward(self, ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch embedding_dim"]:
        """The rows of some tokens, multiplied."""
        return super().forward(ids) * self.embed_scale.to(self.dtype)


def can_hold_blocks(layer: nn.Module) -> TypeGuard[nn.Linear | nn.Embedding]:
    """Whether a layer does no more than one that computes from blocks: torch's linear layer or embedding, or Gemma's
    embedding, which multiplies what it looks up.
    """
    return type(layer) in (nn.Linear, nn.Embedding) or (isinstance(layer, nn.Embedding) and _is_scaled(layer))


def place_blocks(model: PreTrainedModel, path: str, weight: BlockWeight) -> None:
    """Put a layer that computes from blocks in the place of one that can hold them."""
    layer = model.get_submodule(path)
    if isinstance(layer, nn.Linear):
        model.set_submodule(path, BlockLinear(weight, None if layer.bias is None else layer.bias.detach()))
    elif _is_scaled(layer):
        model.set_submodule(path, ScaledBlockEmbedding(weight, dtype=model.dtype, embed_scale=layer.embed_scale))
    else:
        model.set_submodule(path, BlockEmbedding(weight, dtype=model.dtype))


def _is_scaled(layer: nn.Module) -> bool:
    """Whether an embedding does nothing but multiply what it looks up, as Gemma's does."""
    return isinstance(layer._buffers.get("embed_scale"), Tensor)
