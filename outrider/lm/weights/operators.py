"""Torch's operators `outrider::block_linear`, `outrider::int8_linear` and `outrider::block_rows`: products with packed
weights, the same with states that are rounded to 8 bits, and rows of packed weights.

All are known to `torch.export`. On a CPU the functions of `kernels.cpp` compute them, for states of float32 and of
bfloat16; states of float16 become float32. Without a C++ compiler, on a GPU and for float64, the weights are unpacked a
slice at a time and multiplied by torch.
"""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn import functional as F

from outrider.host.native import native
from outrider.lm.weights.blocks import GROUP, KINDS, NAMES, BlockWeight

SOURCE = Path(__file__).with_name("kernels.cpp")
"""The functions that compute them."""
TYPES = {torch.float32: 0, torch.bfloat16: 1}
"""How the kernels number the types of numbers."""
SMALLEST = 2.0**-100
"""Groups of states whose magnitudes are all below it are rounded to zeros."""

_LIBRARY = torch.library.Library("outrider", "FRAGMENT")
_LIBRARY.define("block_linear(Tensor states, Tensor[] blocks, int[] kinds, int[] sizes, Tensor? bias) -> Tensor")
_LIBRARY.define("int8_linear(Tensor states, Tensor[] blocks, int[] kinds, int[] sizes, Tensor? bias) -> Tensor")
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


def int8_linear(
    states: Float[Tensor, "*batch in_features"], weights: Sequence[BlockWeight], bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "*batch out"]:
    """What `block_linear` computes of `rounded` states. Those with weights of bfloat16 are not rounded."""
    kinds, sizes = [weight.number for weight in weights], [weight.out_features for weight in weights]
    return torch.ops.outrider.int8_linear(states, [weight.data for weight in weights], kinds, sizes, bias)


def rounded(states: Float[Tensor, "*batch in_features"]) -> Float[Tensor, "*batch in_features"]:
    r"""States rounded to 8 bits, each group of 32 by itself.

    A number $x$ of a group whose largest magnitude is $m$ becomes $q m / 127$, where $q$ is the whole number nearest to
    $127 x / m$. The result is float32, or float64 where the states are.

    Example:
        >>> rounded(torch.tensor([[127.0, 0.4, -2.6, *[0.0] * 29]]))[0, :4]
        tensor([127.,   0.,  -3.,   0.])
    """
    groups = states.to(torch.promote_types(states.dtype, torch.float32)).unflatten(-1, (-1, GROUP))
    most = groups.abs().amax(-1, keepdim=True)
    # A number divided by a tensor is rounded twice.
    codes = (groups * (most.new_tensor(127) / most)).round()
    return torch.where(most < SMALLEST, 0, codes * (most / 127)).flatten(-2)


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
    *,
    int8: bool = False,
) -> Float[Tensor, "*batch out"]:
    """The products by torch, in float32 or float64.

    Args:
        int8: Whether states are rounded to 8 bits first.
    """
    dtype = torch.promote_types(states.dtype, torch.float32)
    rows = states.flatten(0, -2).to(dtype)
    coarse = rounded(rows) if int8 else rows
    outputs = [
        F.linear(coarse if rounds(NAMES[kind]) else rows, part.to(dtype))
        for data, kind, size in zip(blocks, kinds, sizes, strict=True)
        for _, part in _weight(data, kind, size).slices()
    ]
    joined = torch.cat(outputs, dim=1)
    if bias is not None:
        joined = joined + bias.to(dtype)
    return joined.to(states.dtype).unflatten(0, states.shape[:-1])


def rounds(kind: str) -> bool:
    """Whether `int8_linear` rounds the states that it multiplies with weights of a kind."""
    return KINDS[kind].bits <= 8


def native_linear(
    states: Float[Tensor, "*batch in_features"],
    blocks: Sequence[UInt8[Tensor, "panels bytes"]],
    kinds: Sequence[int],
    sizes: Sequence[int],
    bias: Float[Tensor, " out"] | None,
    dtype: torch.dtype,
    name: str = "block_linear",
) -> Float[Tensor, "*batch out"]:
    """The products by the kernels. The bits of a state's outputs depend on nothing but the state and the weights.

    Args:
        states: Float32 or bfloat16, on a CPU.
        blocks: The panels of each matrix.
        kinds: The number of each matrix's format.
        sizes: The rows of each matrix.
        bias: Of all outputs.
        dtype: Of the outputs, float32 or bfloat16.
        name: The operator.
    """
    rows = states.reshape(-1, states.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    if bias is not None and (bias.dtype not in TYPES or not bias.is_contiguous()):
        bias = bias.float().contiguous()
    out = states.new_empty((*states.shape[:-1], sum(sizes)), dtype=dtype)
    count = len(kinds)
    failed = getattr(_built(), f"outrider_{name}")(
        rows.data_ptr(),
        TYPES[rows.dtype],
        len(rows),
        rows.stride(0),
        rows.shape[1],
        count,
        (ctypes.c_void_p * count)(*(data.data_ptr() for data in blocks)),
        (ctypes.c_int64 * count)(*kinds),
        (ctypes.c_int64 * count)(*sizes),
        None if bias is None else bias.data_ptr(),
        0 if bias is None else TYPES[bias.dtype],
        out.data_ptr(),
        TYPES[dtype],
    )
    if failed:
        raise ValueError(f"no kernel multiplies states of {rows.shape[1]} numbers with weights of the kinds {kinds}")
    return out


def _linear(
    states: Tensor, blocks: Sequence[Tensor], kinds: Sequence[int], sizes: Sequence[int], bias: Tensor | None
) -> Tensor:
    """The operator `block_linear`."""
    if states.device.type != "cpu" or states.dtype == torch.float64 or _kernels() is None:
        return plain_linear(states, blocks, kinds, sizes, bias)
    if states.dtype not in TYPES:
        return native_linear(states.float(), blocks, kinds, sizes, bias, torch.float32).to(states.dtype)
    return native_linear(states, blocks, kinds, sizes, bias, states.dtype)


def _int8_linear(
    states: Tensor, blocks: Sequence[Tensor], kinds: Sequence[int], sizes: Sequence[int], bias: Tensor | None
) -> Tensor:
    """The operator `int8_linear`."""
    if states.device.type != "cpu" or states.dtype == torch.float64 or _kernels() is None:
        return plain_linear(states, blocks, kinds, sizes, bias, int8=True)
    if states.dtype not in TYPES:
        return native_linear(states.float(), blocks, kinds, sizes, bias, torch.float32, "int8_linear").to(states.dtype)
    return native_linear(states, blocks, kinds, sizes, bias, states.dtype, "int8_linear")


def _rows(ids: Tensor, blocks: Tensor, kind: int, size: int, features: int, dtype: torch.dtype) -> Tensor:
    """The operator `block_rows`."""
    if ids.device.type != "cpu" or _kernels() is None:
        rows = _weight(blocks, kind, size).dequantised(dtype, ids.flatten())
        return rows.unflatten(0, ids.shape) if ids.dim() else rows.squeeze(0)
    ids = ids.long().contiguous()
    out = blocks.new_empty((*ids.shape, features), dtype=dtype if dtype in TYPES else torch.float32)
    failed = _built().outrider_block_rows(
        ids.data_ptr(), ids.numel(), blocks.data_ptr(), kind, size, features, out.data_ptr(), TYPES[out.dtype]
    )
    if failed:
        raise IndexError(f"an id is not in the range of {size} rows")
    return out.to(dtype)


def has_kernels() -> bool:
    """Whether the functions of `kernels.cpp` compute products on a CPU; otherwise torch does, slowly."""
    return _kernels() is not None


def _built() -> ctypes.CDLL:
    """The functions of `kernels.cpp`, where they can be built."""
    library = _kernels()
    if library is None:
        raise RuntimeError("the kernels of packed weights are not built, because there is no C++ compiler")
    return library


@functools.cache
def _kernels() -> ctypes.CDLL | None:
    """The functions of `kernels.cpp`; None if they cannot be built here."""
    library = native(SOURCE)
    return None if library is None else _declared(library)


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library, knowing what its functions take."""
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    for linear in (library.outrider_block_linear, library.outrider_int8_linear):
        linear.argtypes = [
            *(pointer, number, number, number, number),
            *(number, pointer, pointer, pointer, pointer, number, pointer, number),
        ]
    library.outrider_block_rows.argtypes = [pointer, number, pointer, number, number, number, pointer, number]
    return library


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
_LIBRARY.impl("int8_linear", _int8_linear, "CompositeExplicitAutograd")
_LIBRARY.impl("block_rows", _rows, "CompositeExplicitAutograd")
torch.library.register_fake("outrider::block_linear", _fake_linear)
torch.library.register_fake("outrider::int8_linear", _fake_linear)
torch.library.register_fake("outrider::block_rows", _fake_rows)
