"""What a module's weights are: plain tensors or others, numbers or not. NaN and infinities come from damaged files and
from training that diverged.
"""

from itertools import chain
from typing import TypeGuard

import torch
from torch import Tensor, nn

from outrider.core.types import InputError


def plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear layer that does what its class says, with a weight that is here.

    Quantisers put weights of their own type into it, or a class of their own in its place. Offloading keeps the weight
    elsewhere and replaces the layer's `forward`. Tensor parallel models have hooks on it.
    """
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    return whole(module) and not module._forward_hooks and not module._forward_pre_hooks


def whole(module: nn.Module) -> bool:
    """Whether all weights and buffers of a module are plain tensors that are here, not quantised, not offloaded."""
    tensors = chain(module.parameters(), module.buffers())
    return all(type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta for tensor in tensors)


def weight_bytes(module: nn.Module) -> int:
    """Bytes of a module's weights, those that layers keep as buffers included. Shared ones count once."""
    return sum(tensor.nbytes for tensor in chain(module.parameters(), module.buffers()))


def has_other_than_numbers(tensor: Tensor) -> bool:
    """Whether a tensor holds NaN or an infinity. Whole numbers, packed weights and tensors elsewhere pass.

    Example:
        >>> has_other_than_numbers(torch.tensor([1.0, torch.inf])), has_other_than_numbers(torch.ones(3))
        (True, False)
    """
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.is_floating_point() and not tensor.is_meta
    if not plain or not tensor.numel():
        return False
    # One pass without a copy; the largest size cannot overflow.
    largest = torch.linalg.vector_norm(tensor.detach() if tensor.itemsize > 1 else tensor.detach().float(), torch.inf)
    return not bool(largest.isfinite())


def check_weights(module: nn.Module, what: str) -> None:
    """Raise InputError if a weight is not a number. It reads all of them.

    Args:
        what: What a person calls the module.
    """
    for name, weight in module.named_parameters():
        if has_other_than_numbers(weight):
            raise InputError(
                f"{name} of {what} holds values that are not numbers (NaN or infinity); its checkpoint is damaged, so "
                "get it again"
            )


def check_logits(logits: Tensor, module: nn.Module, what: str) -> None:
    """Raise InputError if logits are not numbers because a weight is none. The weights are read in that case only.

    Nothing is read of a module on the meta device, which has shapes and no values.
    """
    if not logits.is_meta and not logits.isfinite().all():
        check_weights(module, what)
