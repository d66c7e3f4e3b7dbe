"""Linear layers that read the same input, made one: fewer and larger matrix products say the same."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

from outrider.lm.hf.weights import plain
from outrider.lm.weights.linear import BlockLinear, Int8Linear
from outrider.lm.weights.operators import block_linear, int8_linear

_Layer = nn.Linear | BlockLinear


def merge(model: nn.Module, run: Callable[[], object]) -> None:
    """Let linear layers that read the same tensor share one product, in place.

    The first of them computes all, from a copy of their weights; packed weights are not copied. So they must always be
    called in the order in which `run` calls them.

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


def as_blocks(model: nn.Module) -> None:
    """Let plain linear layers in bfloat16 compute from copies of their weights by the kernel for packed weights, in
    place. The bits of a row then do not depend on other rows, and one parallel loop serves layers that are merged.

    Args:
        model: A model whose modules nothing else uses.
    """
    copies: dict[int, BlockLinear] = {}
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if plain(layer) and BlockLinear.takes(layer):
                if id(layer) not in copies:
                    copies[id(layer)] = BlockLinear.of(layer)
                setattr(parent, name, copies[id(layer)])


class _First(nn.Module):
    """The first of some linear layers: it computes all of them, and leaves the outputs of the others to them."""

    def __init__(self, layers: Sequence[_Layer], outputs: list[Tensor]) -> None:
        super().__init__()
        biases = [layer.bias for layer in layers if layer.bias is not None]
        bias = torch.cat([each.detach() for each in biases]) if biases else None
        blocks = [layer for layer in layers if isinstance(layer, BlockLinear)]
        plain_layers = [layer for layer in layers if isinstance(layer, nn.Linear)]
        self.product = _JoinedBlocks(blocks, bias) if blocks else _JoinedLinear(plain_layers, bias)
        self._sizes, self._outputs = [layer.out_features for layer in layers], outputs

    def forward(self, states: Float[Tensor, "*batch size"]) -> Float[Tensor, "*batch first"]:
        parts = self.product(states).split(self._sizes, -1)
        # As one block of memory each: how parts lie would decide which sizes a graph is for.
        blocks = [part.clone(memory_format=torch.contiguous_format) for part in parts]
        self._outputs[:] = blocks[1:]
        return blocks[0]


class _JoinedLinear(nn.Module):
    """One product with copies of the weights of several layers, one behind another."""

    def __init__(self, layers: Sequence[nn.Linear], bias: Float[Tensor, " all"] | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.cat([layer.weight for layer in layers]), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, states: Float[Tensor, "*batch size"]) -> Float[Tensor, "*batch all"]:
        return linear(states, self.weight, self.bias)


class _JoinedBlocks(nn.Module):
    """One product with the packed weights of several layers, which stay where they are. Their kinds may differ."""

    bias: Float[Tensor, " all"] | None

    def __init__(self, layers: Sequence[BlockLinear], bias: Float[Tensor, " all"] | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.register_buffer("bias", bias)
        self._product = int8_linear if isinstance(layers[0], Int8Linear) else block_linear

    def forward(self, states: Float[Tensor, "*batch size"]) -> Float[Tensor, "*batch all"]:
        weights = [layer.blocks for layer in self.layers if isinstance(layer, BlockLinear)]
        return self._product(states, weights, self.bias)


class _Other(nn.Module):
    """Another one of them."""

    def __init__(self, outputs: list[Tensor]) -> None:
        super().__init__()
        self._outputs = outputs

    def forward(self, states: Float[Tensor, "*batch size"]) -> Float[Tensor, "*batch own"]:
        return self._outputs.pop(0)


def _siblings(model: nn.Module, run: Callable[[], object]) -> list[list[_Layer]]:
    """Linear layers, plain or packed, that read the same tensor, once, and are alike otherwise, in the order of their
    calls.
    """
    calls: list[tuple[_Layer, Tensor]] = []

    def note(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(layer, _Layer)
        # One that is called by keyword stays alone.
        if arguments:
            calls.append((layer, arguments[0]))

    layers = [layer for layer in model.modules() if isinstance(layer, BlockLinear) or plain(layer)]
    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    called = [layer for layer, _ in calls]
    siblings: dict[tuple[int, bool, type], list[_Layer]] = {}
    for layer, tensor in calls:
        if called.count(layer) == 1:
            siblings.setdefault((id(tensor), layer.bias is None, type(layer)), []).append(layer)
    return [group for group in siblings.values() if len(group) > 1]
