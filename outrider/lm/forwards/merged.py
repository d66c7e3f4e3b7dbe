"""Linear layers that read the same input, made one: fewer and larger matrix products say the same."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

from outrider.lm.hf.weights import plain


def merge(model: nn.Module, run: Callable[[], object]) -> None:
    """Let linear layers that read the same tensor share one product, in place.

    The first of them computes all, from a copy of their weights. So they must always be called in the order in which
    `run` calls them.

    Args:
        model: A model whose modules nothing else uses.
        run: Makes a forward of it.

    Example:
        >>> model = nn.ModuleDict({"q": nn.Linear(4, 8), "k": nn.Linear(4, 2)})
        >>> states = torch.ones(3, 4)
        >>> before = [layer(states) for layer in model.values()]
        >>> merge(model, lambda: [layer(states) for layer in model.values()])
        >>> [torch.allclose(layer(states), old) for layer, old in zip(model.values(), before)]
        [True, True]
    """
    names = {id(layer): name for name, layer in model.named_modules()}
    for layers in _siblings(model, run):
        outputs: list[Tensor] = []
        first = _First(layers, outputs)
        model.set_submodule(names[id(layers[0])], first)
        for layer in layers[1:]:
            model.set_submodule(names[id(layer)], _Other(outputs))


class _First(nn.Module):
    """The first of some linear layers: it computes all of them, and leaves the outputs of the others to them."""

    def __init__(self, layers: Sequence[nn.Linear], outputs: list[Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.cat([layer.weight for layer in layers]), requires_grad=False)
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        self.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
        self._sizes, self._outputs = [layer.out_features for layer in layers], outputs

    def forward(self, states: Float[Tensor, "*batch size"]) -> Float[Tensor, "*batch first"]:
        parts = linear(states, self.weight, self.bias).split(self._sizes, -1)
        # As one block of memory each: how parts lie would decide which sizes a graph is for.
        blocks = [part.clone(memory_format=torch.contiguous_format) for part in parts]
        self._outputs[:] = blocks[1:]
        return blocks[0]


class _Other(nn.Module):
    """Another one of them."""

    def __init__(self, outputs: list[Tensor]) -> None:
        super().__init__()
        self._outputs = outputs

    def forward(self, states: Float[Tensor, "*batch size"]) -> Float[Tensor, "*batch own"]:
        return self._outputs.pop(0)


def _siblings(model: nn.Module, run: Callable[[], object]) -> list[list[nn.Linear]]:
    """Plain linear layers that read the same tensor, once, and are alike otherwise, in the order of their calls."""
    calls: list[tuple[nn.Linear, Tensor]] = []

    def note(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(layer, nn.Linear)
        # One that is called by keyword stays alone.
        if arguments:
            calls.append((layer, arguments[0]))

    hooks = [layer.register_forward_pre_hook(note) for layer in model.modules() if plain(layer)]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    called = [layer for layer, _ in calls]
    siblings: dict[tuple[int, bool], list[nn.Linear]] = {}
    for layer, tensor in calls:
        if called.count(layer) == 1:
            siblings.setdefault((id(tensor), layer.bias is None), []).append(layer)
    return [group for group in siblings.values() if len(group) > 1]
