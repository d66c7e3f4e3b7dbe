"""Torch's operators `outrider::block_linear` and `outrider::block_rows`: products with packed weights, and their rows.

Both are known to `torch.export`. Without a C++ compiler, and on a GPU, the weights are unpacked a slice at a time and
multiplied in float32.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn import functional as F

from outrider.lm.weights.blocks import KINDS, NAMES, BlockWeight

_LIBRARY = torch.library.Library("outrider", "FRAGMENT")
_LIBRARY.define("block_linear(Tensor states, Tensor[] blocks, int[] kinds, int[] sizes, Tensor? bias) -> Tensor")
_LIBRARY.define("block_rows(Tensor ids, Tensor blocks, int kind, int size, int features, ScalarType dtype) -> Tensor")


def block_linear(
    states: Float[Tensor, "*batch in_features"], weights: Sequence[BlockWeight], bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "*batch out"]:
    """Products of states with matrices of packed weights, one behind another, plus a bias.

    Args:
        states: What is multiplied. Float32 is multiplied in float32.
        weights: Matrices that read the same states.
        bias: Of all outputs.

    Returns:
        The outputs of all matrices, in the dtype of the states.
    """
    kinds, sizes = [weight.number for weight in weights], [weight.out_features for weight in weights]
    return torch.ops.outrider.block_linear(states, [weight.data for weight in weights], kinds, sizes, bias)


def block_rows(
    ids: Int[Tensor, "*batch"], weight: BlockWeight, dtype: torch.dtype
) -> Float[Tensor, "*batch in_features"]:
    """Rows of a matrix of packed weights, exact up to the rounding to `dtype`."""
    return torch.ops.outrider.block_rows(
        ids, weight.data, weight.number, weight.out_features, weight.in_features, dtype
    )


def plain_linear(
    states: Float[Tensor, "*batch in_features"],
    blocks: Sequence[UInt8[Tensor, "panels bytes"]],
    kinds: Sequence[int],
    sizes: Sequence[int],
    bias: Float[Tensor, " out"] | None,
) -> Float[Tensor, "*batch out"]:
    """The products, by unpacking the weights."""
    rows = states.flatten(0, -2).float()
    outputs = [
        F.linear(rows, part)
        for data, kind, size in zip(blocks, kinds, sizes, strict=True)
        for _, part in _weight(data, kind, size).slices()
    ]
    joined = torch.cat(outputs, dim=1)
    if bias is not None:
        joined = joined + bias.float()
    return joined.to(states.dtype).unflatten(0, states.shape[:-1])


def _linear(
    states: Tensor, blocks: Sequence[Tensor], kinds: Sequence[int], sizes: Sequence[int], bias: Tensor | None
) -> Tensor:
    """The operator `block_linear`."""
    return plain_linear(states, blocks, kinds, sizes, bias)


def _rows(ids: Tensor, blocks: Tensor, kind: int, size: int, features: int, dtype: torch.dtype) -> Tensor:
    """The operator `block_rows`."""
    rows = _weight(blocks, kind, size).dequantised(dtype, ids.flatten())
    return rows.unflatten(0, ids.shape) if ids.dim() else rows.squeeze(0)


def _fake_linear(
    states: Tensor, blocks: Sequence[Tensor], kinds: Sequence[int], sizes: Sequence[int], bias: Tensor | None
) -> Tensor:
    """The shape of the outputs."""
    return states.new_empty((*states.shape[:-1], sum(sizes)))


def _fake_rows(ids: Tensor, blocks: Tensor, kind: int, size: int, features: int, dtype: torch.dtype) -> Tensor:
    """The shape of the rows."""
    return blocks.new_empty((*ids.shape, features), dtype=dtype)


def _weight(data: Tensor, kind: int, size: int) -> BlockWeight:
    """The matrix whose panels these are."""
    layout = KINDS[NAMES[kind]]
    features = data.shape[1] // layout.chunk * layout.weights
    return BlockWeight(kind=layout.name, out_features=size, in_features=features, data=data)


_LIBRARY.impl("block_linear", _linear, "CompositeExplicitAutograd")
_LIBRARY.impl("block_rows", _rows, "CompositeExplicitAutograd")
torch.library.register_fake("outrider::block_linear", _fake_linear)
torch.library.register_fake("outrider::block_rows", _fake_rows)
