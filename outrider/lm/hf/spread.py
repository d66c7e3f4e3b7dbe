"""A model whose layers are on several devices, as `device_map` puts them there.

Relied on in accelerate (read and run in 1.15): a module that it has dispatched has `_hf_hook`, and a `forward` of its
own that takes what it is given to the module's device. The whole model's moves what it returns to the device of its
input. It copies masks and positions anew for every layer; `copied_once` keeps the copies.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.core.inputs import InputError

DISPATCHED = ("forward", "_old_forward", "_hf_hook")
"""What accelerate puts on a module."""


def is_dispatched(module: nn.Module) -> bool:
    """Whether accelerate moves what a module is given to the module's device."""
    return "_hf_hook" in vars(module)


def device_of(layer: nn.Module) -> torch.device | None:
    """Where a layer is; None if its weights are elsewhere until it runs."""
    devices = (weight.device for weight in layer.parameters())
    return next((device for device in devices if device.type != "meta"), None)


def is_spread(layers: nn.ModuleList | None) -> bool:
    """Whether layers are on more than one device.

    Example:
        >>> is_spread(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
        False
    """
    return layers is not None and len({device_of(layer) for layer in layers} - {None}) > 1


def check_devices(model: PreTrainedModel, devices: set[torch.device], *, alone: bool = False) -> None:
    """Raise InputError if a model is on several devices and nothing moves its hidden states between them.

    Args:
        devices: Where its keys and values are.
        alone: Whether it has to be on one device.
    """
    if devices == {model.device} or (is_dispatched(model) and not alone):
        return
    where = ", ".join(sorted({str(model.device), *map(str, devices)}))
    if alone:
        raise InputError(f"a model with recurrent layers must be on one device, got {where}; leave out device_map")
    raise InputError(
        f"the model is on several devices, {where}, and nothing moves hidden states between them; load it with "
        "device_map='auto' (or a dict), which needs accelerate"
    )


@contextmanager
def copied_once(layers: nn.ModuleList, device: torch.device) -> Iterator[None]:
    """While the body runs, what many layers are given is copied to each device once.

    Args:
        device: Where the model's inputs are.
    """
    kept: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def moved(value: Any, place: torch.device) -> Any:
        if isinstance(value, tuple):
            return tuple(moved(each, place) for each in value)
        if not isinstance(value, Tensor) or value.device == place:
            return value
        if (key := (id(value), place)) not in kept:
            # The original stays alive, so that no other tensor gets its id.
            kept[key] = value, value.to(place, non_blocking=True)
        return kept[key][1]

    def hook(place: torch.device) -> Any:
        def entering(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return moved(args, place), {name: moved(value, place) for name, value in named.items()}

        return entering

    with ExitStack() as handles:
        for layer in layers:
            if (place := device_of(layer)) not in (None, device):
                handle = layer.register_forward_pre_hook(hook(place), with_kwargs=True)
                handles.callback(handle.remove)
        yield


class Returning(nn.Module):
    """A module whose results go to one device.

    Attributes:
        module: The module.
        device: Where its results go.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.module, self.device = module, device

    def forward(self, states: Tensor) -> Tensor:
        result: Tensor = self.module(states)
        return result.to(self.device)
