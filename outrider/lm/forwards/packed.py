"""Linear layers whose weights lie as the CPU's kernels want them, so that they are not rearranged per call.

The kernels are those of oneDNN. For bfloat16 it has none on processors without AVX-512, where torch multiplies slowly,
above all with many tokens; there they are the kernels for packed weights.

Relied on in torch (read and run in 2.13): `ops.mkldnn._reorder_linear_weight` and `ops.mkldnn._linear_pointwise`, the
operations that its compiler uses when weights are frozen. They are private.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.host.mapped import release_pages
from outrider.lm.forwards.forward import Forward
from outrider.lm.forwards.twin import Module, twin
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.weights import plain
from outrider.lm.slots.cache import free_bytes
from outrider.lm.weights.linear import BlockLinear
from outrider.lm.weights.operators import has_kernels

AT_ONCE = 1 << 27
"""Bytes of weights that are copied before their pages are given back."""


class PackedLinear(nn.Module):
    """What an `nn.Linear` computes, to the bit, from a weight that was rearranged once.

    Attributes:
        weight: In oneDNN's own layout; its shape is that of the original.
        bias: The original.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        with torch.inference_mode(False), torch.no_grad():
            self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, states: Float[Tensor, "*batch features"]) -> Float[Tensor, "*batch outputs"]:
        return torch.ops.mkldnn._linear_pointwise(states, self.weight, self.bias, "none", [], "")


def packable(model: PreTrainedModel) -> bool:
    """Whether a model can be packed: in bfloat16 on a CPU. Models with recurrent layers run as they are."""
    return not Anatomy.of(model).recurrent and packs(model.device, model.dtype)


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether linear layers of this kind are packed, on this machine and build of torch."""
    return keeps_bits(device, dtype) or (device.type == "cpu" and dtype == torch.bfloat16 and has_kernels())


def keeps_bits(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packed linear layers of this kind say the bits of plain ones, on this machine and build of torch.

    That is so for bfloat16 by oneDNN; in float32 its packed kernels add up in another order.
    """
    if device.type != "cpu" or dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is not None and bool(supported())


def packed(model: Module) -> Module:
    """A twin that shares the weights, except that plain linear layers have packed copies of theirs.

    It says the same in less time, where `keeps_bits` to the bit. Weights that are mapped from files leave memory while
    they are copied. Layers that are not `plain` (quantised ones, adapters) and weights for which there are no kernels
    here are shared as they are. What is done to the model's linear layers later does not reach the twin.
    """
    packed_model = twin(model)
    copies: dict[int, nn.Module] = {}
    copied = 0
    for parent in list(packed_model.modules()):
        for name, child in list(parent.named_children()):
            if plain(child) and (layer_of := _packing(child)) is not None:
                if id(child) not in copies:
                    copies[id(child)] = layer_of(child)
                    copied += child.weight.nbytes
                    if copied >= AT_ONCE:
                        release_pages(model.parameters())
                        copied = 0
                setattr(parent, name, copies[id(child)])
    return packed_model


def _packing(layer: nn.Linear) -> Callable[[nn.Linear], nn.Module] | None:
    """What packs a plain layer here; None where there are no kernels for it."""
    device, dtype = layer.weight.device, layer.weight.dtype
    if keeps_bits(device, dtype):
        return PackedLinear
    return BlockLinear.of if packs(device, dtype) and BlockLinear.takes(layer) else None


def worth_packing(model: PreTrainedModel) -> bool:
    """Whether packing is possible and takes less than a quarter of the memory that is free."""
    return packable(model) and fits_packed(model, model.device)


def uncompiled(model: PreTrainedModel) -> Forward:
    """How forwards of a model run on a CPU without a library of their own: packed where it is worth it, else eager."""
    return "packed" if worth_packing(model) else "eager"


def fits_packed(module: nn.Module, device: torch.device) -> bool:
    """Whether packed copies of a module's linear layers take less than a quarter of the memory that is free."""
    need, free = sum(m.weight.nbytes for m in module.modules() if plain(m)), free_bytes(device)
    return free is not None and need < free / 4
