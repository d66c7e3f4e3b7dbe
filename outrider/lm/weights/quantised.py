"""Packed weights from plain ones, with the codes that llama.cpp's `quantize` gives them."""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from outrider.core.types import InputError
from outrider.lm.weights.blocks import GROUP, SLICE, BlockWeight


def quantised(weight: Float[Tensor, "rows in_features"], kind: str) -> BlockWeight:
    """A matrix of packed weights, each rounded to the nearest code of its group.

    The result is another matrix: a model of such weights is the quantised model.

    Args:
        weight: Plain weights.
        kind: The format, a name in `QUANTISERS`.

    Raises:
        InputError: There is no such format, or the rows are no whole groups of 32.

    Example:
        >>> round(quantised(torch.eye(32), "Q8_0").dequantised(torch.float32).sum().item(), 2)
        32.0

    References:
        `quantize_row_q8_0_ref` and `quantize_row_q4_0_ref` of
        https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c
    """
    if kind not in QUANTISERS:
        raise InputError(f"unknown kind of blocks {kind!r}; available: {', '.join(QUANTISERS)}")
    if weight.shape[1] % GROUP:
        raise InputError(f"{kind} has groups of {GROUP} weights, and a row of {weight.shape[1]} is not made of them")
    slices = [
        QUANTISERS[kind](part.float().unflatten(1, (-1, GROUP))).flatten(1) for part in weight.detach().split(SLICE)
    ]
    return BlockWeight.of_gguf(torch.cat(slices), kind)


def _q8_0(groups: Float[Tensor, "rows groups 32"]) -> UInt8[Tensor, "rows groups 34"]:
    """Signed codes: the largest weight of a group is 127 or -127."""
    scale = groups.abs().amax(2, keepdim=True) / 127
    scaled = groups * _inverse(scale)
    # Halves are rounded away from zero. A half more, rounded down, would round up what lies just below a half.
    whole = scaled.abs().floor()
    codes = torch.copysign(whole + (2 * (scaled.abs() - whole)).floor(), scaled).to(torch.int8)
    return torch.cat([_bytes(scale), codes.view(torch.uint8)], dim=2)


def _q4_0(groups: Float[Tensor, "rows groups 32"]) -> UInt8[Tensor, "rows groups 18"]:
    """Codes from 0 to 15, of which 8 is zero; the weight of largest magnitude gets code 0."""
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scale = largest / -8
    codes = (groups * _inverse(scale) + 8.5).to(torch.uint8).clamp(max=15)
    return torch.cat([_bytes(scale), codes[..., :16] | codes[..., 16:] << 4], dim=2)


def _inverse(scale: Float[Tensor, "rows groups 1"]) -> Float[Tensor, "rows groups 1"]:
    """One over each scale; zero for groups of zeros."""
    return torch.where(scale == 0, 0, 1 / scale)


def _bytes(scale: Float[Tensor, "rows groups 1"]) -> UInt8[Tensor, "rows groups 2"]:
    """Scales as the file has them."""
    return scale.to(torch.float16).view(torch.uint8)


QUANTISERS: Mapping[str, Callable[[Tensor], Tensor]] = {"Q8_0": _q8_0, "Q4_0": _q4_0}
"""What makes the blocks of each format that plain weights can be rounded to."""
