"""Torch's operator `outrider::gated`: what a gated layer (SwiGLU, GeGLU) makes of the two halves of one product.

A compiler makes a loop of it for one thread, while the others wait.
"""

import ctypes
import functools
import operator
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from outrider.host.native import native
from outrider.lm.weights.operators import TYPES

SOURCE = Path(__file__).with_suffix(".cpp")

_LIBRARY = torch.library.Library("outrider", "FRAGMENT")
_LIBRARY.define("gated(Tensor joined, bool gelu) -> Tensor")


def gated(joined: Float[Tensor, "*batch both"], gelu: bool) -> Float[Tensor, "*batch half"]:
    r"""$f(a) \cdot b$ for the first half $a$ and the second half $b$ of each row, rounded once.

    Args:
        gelu: Whether f is gelu, approximated by tanh; otherwise it is silu.

    Example:
        >>> gated(torch.tensor([[0.0, 1.0, 5.0, 2.0]]), gelu=False)
        tensor([[0.0000, 1.4621]])
    """
    return torch.ops.outrider.gated(joined, gelu)


def fuse_gates(graph: torch.fx.GraphModule, products: Sequence[torch._ops.OpOverload]) -> int:
    """Let an exported graph call `gated` behind products that compute both halves, in place.

    Args:
        graph: Its nodes call torch's operators.
        products: Operators whose outputs are halved.

    Returns:
        How many gates there were.
    """
    found = 0
    for node in list(graph.graph.nodes):
        if node.target is not torch.ops.aten.mul.Tensor:
            continue
        for gate, other in (node.args, node.args[::-1]):
            gelu = _activates(gate)
            if gelu is None or (product := _halved(gate.args[0], 0, products)) is None:
                continue
            if product is not _halved(other, 1, products):
                continue
            with graph.graph.inserting_before(node):
                fused = graph.graph.call_function(torch.ops.outrider.gated.default, (product, gelu))
            fused.meta = dict(node.meta)
            node.replace_all_uses_with(fused)
            found += 1
            break
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return found


def _activates(node: object) -> bool | None:
    """Whether a node is gelu by tanh, or silu; None for others, and where its output is read elsewhere."""
    if not isinstance(node, torch.fx.Node) or len(node.users) > 1:
        return None
    if node.target is torch.ops.aten.gelu.default and node.kwargs.get("approximate") == "tanh":
        return True
    return False if node.target is torch.ops.aten.silu.default else None


def _halved(node: object, half: int, products: Sequence[torch._ops.OpOverload]) -> torch.fx.Node | None:
    """The product of which a node is the first or the second half; None if it is not."""
    if isinstance(node, torch.fx.Node) and node.target is torch.ops.aten.clone.default:
        node = node.args[0]
    if not isinstance(node, torch.fx.Node) or node.target is not operator.getitem or node.args[1] != half:
        return None
    split = node.args[0]
    assert isinstance(split, torch.fx.Node)
    if split.target is not torch.ops.aten.split_with_sizes.default:
        return None
    product, sizes, *axis = split.args
    halves = len(sizes) == 2 and sizes[0] == sizes[1] and axis == [-1]  # type: ignore[arg-type, index]
    return product if halves and isinstance(product, torch.fx.Node) and product.target in products else None


def _plain(joined: Tensor, gelu: bool) -> Tensor:
    """What `gated` computes, by torch's operations."""
    a, b = joined.to(torch.promote_types(joined.dtype, torch.float32)).chunk(2, -1)
    return ((F.gelu(a, approximate="tanh") if gelu else F.silu(a)) * b).to(joined.dtype)


def _gated(joined: Tensor, gelu: bool) -> Tensor:
    """The operator on CPUs."""
    if (kernel := _kernel()) is None or joined.dtype not in TYPES:
        return _plain(joined, gelu)
    joined = joined.contiguous()
    out = _fake(joined, gelu)
    width = out.shape[-1]
    kernel(joined.data_ptr(), TYPES[joined.dtype], joined.numel() // (2 * width), width, gelu, out.data_ptr())
    return out


def _fake(joined: Tensor, gelu: bool) -> Tensor:
    """The shape of the output."""
    return joined.new_empty((*joined.shape[:-1], joined.shape[-1] // 2))


@functools.cache
def _kernel() -> "ctypes._NamedFuncPointer | None":
    """The kernel; None without a compiler."""
    if (library := native(SOURCE)) is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    kernel = library.outrider_gated
    kernel.argtypes, kernel.restype = [pointer, number, number, number, number, pointer], None
    return kernel


_LIBRARY.impl("gated", _gated, "CPU")
_LIBRARY.impl("gated", _plain, "CompositeExplicitAutograd")
torch.library.register_fake("outrider::gated", _fake)
