"""Scales and offsets for groups of weights with codes of four bits, as llama.cpp finds them for Q4_K.

Of 22 candidates for the codes of a group, those are taken whose least squares are the smallest. Large weights count
more. All steps and sums are done in one order, in float32, by torch as by `fits.cpp`, so that all roundings are
those of `make_qkx2_quants` in https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c
"""

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from outrider.host.native import native

AT_ONCE = 1 << 12
"""Groups that torch fits at once: about what a cache holds."""
CANDIDATES = 21
"""Codes that are tried besides those of the whole range."""
SIZE = 32
"""Weights of a group."""


@dataclass(frozen=True, kw_only=True)
class Fits:
    """What stands for groups of weights: a scale times a code, minus an offset.

    Attributes:
        scales: The scale of each group.
        offsets: The offset of each group, not negative.
        codes: From 0 to 15.
    """

    scales: Float[Tensor, " groups"]
    offsets: Float[Tensor, " groups"]
    codes: UInt8[Tensor, "groups 32"]

    @classmethod
    def of(cls, groups: Float[Tensor, "groups 32"]) -> "Fits":
        """The fits of some groups."""
        library = _library()
        if library is None:
            return cls.by_torch(groups)
        groups = groups.contiguous()
        scales, offsets = groups.new_empty(len(groups)), groups.new_empty(len(groups))
        codes = torch.empty(groups.shape, dtype=torch.uint8)
        places = (each.data_ptr() for each in (scales, offsets, codes))
        library.outrider_fits(groups.data_ptr(), len(groups), *places)
        return cls(scales=scales, offsets=offsets, codes=codes)

    @classmethod
    def by_torch(cls, groups: Float[Tensor, "groups 32"]) -> "Fits":
        """The same without a C++ compiler."""
        parts = [_fitted(part.T.contiguous()) for part in groups.split(AT_ONCE)]
        return cls(
            scales=torch.cat([part.scales for part in parts]),
            offsets=torch.cat([part.offsets for part in parts]),
            codes=torch.cat([part.codes for part in parts]),
        )


def _fitted(x: Float[Tensor, "32 groups"]) -> Fits:
    """The fits of some groups: `make_qkx2_quants` with squared errors."""
    # Torch's roots and its numbers divided by tensors are not rounded to the nearest in float32.
    weights = (_sum(x * x) / SIZE).double().sqrt().float() + x.abs()
    sum_w, sum_x = _sum(weights), _sum(weights * x)
    lowest, highest = x.amin(0).clamp(max=0), x.amax(0)
    inverse, least = x.new_tensor(15) / (highest - lowest), lowest
    scale = 1 / inverse
    best_inverse, best_least = inverse, least
    error = _error(x, weights, _codes(x, inverse, least), scale, least)
    for levels in torch.arange(CANDIDATES, dtype=torch.float32) * 0.1 - 1 + 15:
        inverse = levels / (highest - least)
        codes = _codes(x, inverse, least)
        weighted = weights * codes
        sum_l, sum_l2, sum_xl = _sum(weighted), _sum(weighted * codes), _sum(weighted * x)
        determinant = sum_w * sum_l2 - sum_l * sum_l
        new_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
        new_least = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
        new_scale, new_least = torch.where(new_least > 0, sum_xl / sum_l2, new_scale), new_least.clamp(max=0)
        new_error = _error(x, weights, codes, new_scale, new_least)
        better = (determinant > 0) & (new_error < error)
        best_inverse, best_least = torch.where(better, inverse, best_inverse), torch.where(better, least, best_least)
        scale, least = torch.where(better, new_scale, scale), torch.where(better, new_least, least)
        error = torch.where(better, new_error, error)
    flat = highest == lowest
    codes = _codes(x, best_inverse, best_least).masked_fill(flat, 0)
    return Fits(scales=scale.masked_fill(flat, 0), offsets=0 - least, codes=codes.T.to(torch.uint8))


def _codes(
    x: Float[Tensor, "32 groups"], inverse: Float[Tensor, " groups"], least: Float[Tensor, " groups"]
) -> Float[Tensor, "32 groups"]:
    """The nearest codes; halves go to the even one."""
    return ((x - least) * inverse).round_().clamp_(0, 15)


def _error(
    x: Float[Tensor, "32 groups"],
    weights: Float[Tensor, "32 groups"],
    codes: Float[Tensor, "32 groups"],
    scale: Float[Tensor, " groups"],
    least: Float[Tensor, " groups"],
) -> Float[Tensor, " groups"]:
    """The weighted squares of what codes are off by."""
    return _sum((scale * codes).add_(least).sub_(x).square_().mul_(weights))


def _sum(values: Float[Tensor, "32 groups"]) -> Float[Tensor, " groups"]:
    """The sum of each group, added from the first to the last, one after another."""
    total = values[0].clone()
    for row in values[1:]:
        total += row
    return total


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The function of `fits.cpp`; None if it cannot be built here."""
    library = native(Path(__file__).with_name("fits.cpp"))
    if library is not None:
        pointer = ctypes.c_void_p
        library.outrider_fits.argtypes = [pointer, ctypes.c_int64, pointer, pointer, pointer]
        library.outrider_fits.restype = None
    return library
