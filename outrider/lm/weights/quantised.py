"""Packed weights from plain ones, with the codes that llama.cpp's `quantize` gives them."""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from outrider.core.types import InputError
from outrider.lm.weights.blocks import GROUP, KINDS, BlockWeight
from outrider.lm.weights.fits import Fits

AT_ONCE = 1 << 19
"""Weights that are rounded at once: about what a cache holds."""
FALLBACK = {"Q4_K": "Q5_0"}
"""What llama.cpp takes where rows are no whole blocks."""


def quantised(weight: Float[Tensor, "rows in_features"], kind: str) -> BlockWeight:
    """A matrix of packed weights, each rounded to a code of its group.

    The result is another matrix: a model of such weights is the quantised model.

    Args:
        weight: Plain weights.
        kind: The format, a name in `QUANTISERS`.

    Raises:
        InputError: There is no such format, or the rows are no whole blocks.

    Example:
        >>> round(quantised(torch.eye(32), "Q8_0").dequantised(torch.float32).sum().item(), 2)
        32.0

    References:
        `quantize_row_q8_0_ref` and others of
        https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c
    """
    if kind not in QUANTISERS:
        raise InputError(f"unknown kind of blocks {kind!r}; available: {', '.join(QUANTISERS)}")
    size = KINDS[kind].weights
    if weight.shape[1] % size:
        raise InputError(f"{kind} has blocks of {size} weights, and a row of {weight.shape[1]} is not made of them")
    parts = weight.detach().split(max(1, AT_ONCE // weight.shape[1]))
    slices = [QUANTISERS[kind](part.float().unflatten(1, (-1, GROUP))).flatten(1) for part in parts]
    return BlockWeight.of_gguf(torch.cat(slices), kind)


def fitting(kind: str, in_features: int) -> str | None:
    """The format for rows of this many weights: the wanted one, or what llama.cpp takes instead; None: there is none.

    Example:
        >>> fitting("Q4_K", 512), fitting("Q4_K", 896), fitting("Q8_0", 40)
        ('Q4_K', 'Q5_0', None)
    """
    possible = (each for each in (kind, FALLBACK.get(kind, kind)) if in_features % KINDS[each].weights == 0)
    return next(possible, None)


def four_bits(
    scale: Float[Tensor, "rows groups 1"], codes: UInt8[Tensor, "rows groups 32"]
) -> UInt8[Tensor, "rows groups 18"]:
    """Blocks of Q4_0: a weight is its scale times (its code minus 8)."""
    return torch.cat([_bytes(scale), codes[..., :16] | codes[..., 16:] << 4], dim=2)


def five_bits(
    scale: Float[Tensor, "rows groups 1"], codes: UInt8[Tensor, "rows groups 32"]
) -> UInt8[Tensor, "rows groups 22"]:
    """Blocks of Q5_0: a weight is its scale times (its code minus 16)."""
    places = torch.arange(8, dtype=torch.uint8)
    fifth = ((codes >> 4).unflatten(2, (4, 8)) << places).sum(3, dtype=torch.uint8)
    return torch.cat([_bytes(scale), fifth, codes[..., :16] & 15 | (codes[..., 16:] & 15) << 4], dim=2)


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
    return four_bits(*_around(groups, 8))


def _q5_0(groups: Float[Tensor, "rows groups 32"]) -> UInt8[Tensor, "rows groups 22"]:
    """Codes from 0 to 31, of which 16 is zero; the weight of largest magnitude gets code 0."""
    return five_bits(*_around(groups, 16))


def _around(
    groups: Float[Tensor, "rows groups 32"], zero: int
) -> tuple[Float[Tensor, "rows groups 1"], UInt8[Tensor, "rows groups 32"]]:
    """Scales, and codes from 0 to twice `zero`, exclusive."""
    scale = groups.gather(2, groups.abs().argmax(2, keepdim=True)) / -zero
    return scale, (groups * _inverse(scale) + (zero + 0.5)).to(torch.uint8).clamp(max=2 * zero - 1)


def _q4_k(groups: Float[Tensor, "rows groups 32"]) -> UInt8[Tensor, "rows blocks 144"]:
    """Codes from 0 to 15. The scales and the offsets of the eight groups of a block are whole numbers of 6 bits, which
    are multiplied by one number of the block each.

    No weight counts more than others by what data say: `quantize_row_q4_K_ref`, without an importance matrix.
    """
    fits, shape = Fits.of(groups.flatten(0, 1)), (len(groups), -1, 8)
    scales, offsets, codes = fits.scales.view(shape), fits.offsets.view(shape), fits.codes.view(*shape, GROUP)
    unit, scales = _six_bits(scales)
    offset_unit, offsets = _six_bits(offsets)
    step, offset = _rounded(unit) * scales, _rounded(offset_unit) * offsets
    nearest = ((groups.unflatten(1, (-1, 8)) + offset[..., None]) / step[..., None]).round().clamp(0, 15)
    # Where the scale is zero, the codes do not matter and stay as they were.
    codes = torch.where(step[..., None] == 0, codes, nearest).to(torch.uint8).unflatten(2, (4, 2))
    small = [
        scales[..., :4] | scales[..., 4:] >> 4 << 6,
        offsets[..., :4] | offsets[..., 4:] >> 4 << 6,
        scales[..., 4:] & 15 | (offsets[..., 4:] & 15) << 4,
    ]
    nibbles = (codes[..., 0, :] | codes[..., 1, :] << 4).flatten(2)
    return torch.cat([_bytes(unit), _bytes(offset_unit), *small, nibbles], dim=2)


def _six_bits(
    values: Float[Tensor, "rows blocks 8"],
) -> tuple[Float[Tensor, "rows blocks 1"], UInt8[Tensor, "rows blocks 8"]]:
    """The unit of each block, and values in it, of which the largest is 63."""
    most = values.amax(2, keepdim=True).clamp(min=0)
    # A number divided by a tensor is rounded twice.
    inverse = torch.where(most > 0, most.new_tensor(63) / most, 0)
    return most / 63, (inverse * values).round().clamp(0, 63).to(torch.uint8)


def _inverse(scale: Float[Tensor, "rows groups 1"]) -> Float[Tensor, "rows groups 1"]:
    """One over each scale; zero for groups of zeros."""
    return torch.where(scale == 0, 0, 1 / scale)


def _rounded(scale: Float[Tensor, "rows groups 1"]) -> Float[Tensor, "rows groups 1"]:
    """Scales as the file's readers read them."""
    return scale.to(torch.float16).float()


def _bytes(scale: Float[Tensor, "rows groups 1"]) -> UInt8[Tensor, "rows groups 2"]:
    """Scales as the file has them."""
    return scale.to(torch.float16).view(torch.uint8)


QUANTISERS: Mapping[str, Callable[[Tensor], Tensor]] = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q5_0": _q5_0, "Q4_K": _q4_k}
"""What makes the blocks of each format that plain weights can be rounded to."""
