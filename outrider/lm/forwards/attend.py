"""Torch's operator `outrider::attend`: attention of few queries over many keys, by a kernel of our own on CPUs.

What a query reads has the same bits alone and among other queries, slots and threads, and in views of any length that
hold the keys that it sees. A node of a tree reads the same bits as in a chain, if it sees any key before the tree and
the positions of the keys that it sees are consecutive. torch's own kernels add in another order for one query and for
several, and split queries and keys by their numbers.
"""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from outrider.host.native import native

SOURCE = Path(__file__).with_suffix(".cpp")
DTYPES = (torch.float32, torch.bfloat16)
"""Types of queries, keys and values that the kernel knows."""
MASKS = (None, torch.bool, torch.float32, torch.bfloat16)
"""Types of masks by their numbers in the kernel."""

_LIBRARY = torch.library.Library("outrider", "FRAGMENT")
_LIBRARY.define("attend(Tensor queries, Tensor keys, Tensor values, Tensor? mask, float scale) -> Tensor")


def attend(
    queries: Float[Tensor, "rows heads width dim"],
    keys: Float[Tensor, "rows shared view dim"],
    values: Float[Tensor, "rows shared view value_dim"],
    mask: Bool[Tensor, "#rows #heads #width view"] | Float[Tensor, "#rows #heads #width view"] | None,
    scale: float | None = None,
) -> Float[Tensor, "rows width heads value_dim"]:
    r"""$\sum_k w_k v_k$ with $w = \operatorname{softmax}(s\, q \cdot k + m)$, over the keys that a query sees.

    A query that sees no key gets zeros.

    Args:
        queries: The heads of one key head stand one after another.
        keys: Of any strides, but the numbers of a key lie side by side.
        mask: True where a key is seen, or what is added to the scores. Without a mask, the queries are the last ones of
            the keys, and each sees the keys up to its own.
        scale: Of the products; None is one over the root of `dim`.

    Returns:
        What the queries read, contiguous, in their dtype.

    Example:
        >>> keys = torch.randn(1, 2, 70, 8)
        >>> queries = torch.randn(1, 4, 3, 8)
        >>> all_, last = attend(queries, keys, keys, None), attend(queries[:, :, 2:], keys, keys, None)
        >>> torch.equal(all_[:, 2:], last)
        True
    """
    return torch.ops.outrider.attend(queries, keys, values, mask, queries.shape[-1] ** -0.5 if scale is None else scale)


def attends(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel runs here for such queries."""
    return device.type == "cpu" and dtype in DTYPES and _kernel() is not None


def plain_attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """What `attend` computes, by torch's operations."""
    if mask is None:
        width, view = queries.shape[2], keys.shape[2]
        mask = torch.ones(width, view, dtype=torch.bool, device=queries.device).tril(view - width)
    elif mask.dtype != torch.bool:
        mask = mask.to(queries.dtype)
    seen = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
    return seen.transpose(1, 2).contiguous()


def _attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The operator on CPUs."""
    kernel = _kernel()
    mask_dtype = None if mask is None else mask.dtype
    if kernel is None or queries.dtype not in DTYPES or mask_dtype not in MASKS:
        return plain_attend(queries, keys, values, mask, scale)
    queries, keys, values = (each if each.stride(-1) == 1 else each.contiguous() for each in (queries, keys, values))
    (rows, heads, width, dim), (_, shared, view, value_dim) = queries.shape, values.shape
    outputs = queries.new_empty(rows, width, heads, value_dim)
    numbers = (
        *(rows, heads, shared, width, view, dim, value_dim),
        *(*queries.stride()[:3], *keys.stride()[:3], *values.stride()[:3]),
        *([0] * 4 if mask is None else _strides(mask)),
        *(MASKS.index(mask_dtype), queries.dtype == torch.bfloat16),
    )
    kernel(
        *(each.data_ptr() for each in (queries, keys, values)),
        None if mask is None else mask.data_ptr(),
        outputs.data_ptr(),
        (ctypes.c_int64 * len(numbers))(*numbers),
        scale,
    )
    return outputs


def _strides(mask: Tensor) -> Sequence[int]:
    """The strides of a mask as it is read for all rows, heads and queries."""
    return [0 if size == 1 and axis < 3 else mask.stride(axis) for axis, size in enumerate(mask.shape)]


def _fake_attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The shape of what is read."""
    rows, heads, width, _ = queries.shape
    return queries.new_empty(rows, width, heads, values.shape[-1])


@functools.cache
def _kernel() -> "ctypes._NamedFuncPointer | None":
    """The kernel; None without a compiler."""
    if (library := native(SOURCE)) is None:
        return None
    kernel = library.outrider_attend
    kernel.argtypes, kernel.restype = [ctypes.c_void_p] * 6 + [ctypes.c_double], None
    return kernel


_LIBRARY.impl("attend", _attend, "CPU")
_LIBRARY.impl("attend", plain_attend, "CompositeExplicitAutograd")
torch.library.register_fake("outrider::attend", _fake_attend)
