"""How much each layer, head, neuron and direction of the residual stream matters on a text."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from outrider.core.types import InputError
from outrider.lm.hf.anatomy import Anatomy
from outrider.surgery.texts import Progress, Texts, read


@dataclass(frozen=True, kw_only=True)
class Importance:
    r"""What a model does on a text, part by part. All figures are means over tokens.

    Attributes:
        layers: For each layer $1 - \cos(x, y)$, where x is the residual stream before the layer and y behind it: its
            block influence (Men et al. 2024, https://arxiv.org/abs/2403.03853).
        heads: For each layer and head, $\lVert W_o^h a_h \rVert$: the norm of what the head adds to the stream.
        neurons: For each layer and neuron, $|a_j| \lVert d_j \rVert$: the same for a neuron with its column $d_j$.
        directions: For each coordinate of the stream, the sum over all norms of the size of the norm's output there
            (Muralidharan et al. 2024, https://arxiv.org/abs/2407.14679).
        energies: For each norm by its name, the mean square of each coordinate of its input.
    """

    layers: Float[Tensor, " layers"]
    heads: dict[int, Float[Tensor, " heads"]]
    neurons: dict[int, Float[Tensor, " neurons"]]
    directions: Float[Tensor, " width"]
    energies: dict[str, Float[Tensor, " width"]]


def measure_importance(model: PreTrainedModel, texts: Texts, progress: Progress | None = None) -> Importance:
    """Let the model read texts, and say how much each part matters.

    Heads and neurons are known where a layer has `self_attn.o_proj` and `mlp.down_proj`, as Llama has.

    Raises:
        InputError: The texts hold no token, or one that the model does not know; or the model's layers are not known.
    """
    anatomy = Anatomy.of(model)
    if anatomy.layers is None:
        raise InputError(f"the layers of {anatomy.name} do not stand in one list, so none can be taken out")
    means = _Means()
    width, size = anatomy.hidden_size, head_size(anatomy)
    for index, layer in enumerate(anatomy.layers):
        means.watch(layer, f"layer {index}", _influence)
        if (output := _linear(layer, "self_attn", "o_proj")) is not None and output.in_features % size == 0:
            means.watch(output, f"heads {index}", _HeadNorms(output=output, size=size))
        if (down := _linear(layer, "mlp", "down_proj")) is not None:
            means.watch(down, f"neurons {index}", _NeuronNorms(norms=down.weight.detach().float().norm(dim=0)))
    norms = stream_norms(model, width)
    for name, norm in norms.items():
        means.watch(norm, f"energy {name}", _energy)
        means.watch(norm, f"size {name}", _size)
    try:
        read(model, texts, progress)
    finally:
        means.stop()
    layers = range(len(anatomy.layers))
    return Importance(
        layers=torch.stack([means["layer", index] for index in layers]).flatten(),
        heads={index: means["heads", index] for index in layers if ("heads", index) in means},
        neurons={index: means["neurons", index] for index in layers if ("neurons", index) in means},
        directions=torch.stack([means["size", name] for name in norms]).sum(0) if norms else torch.zeros(width),
        energies={name: means["energy", name] for name in norms},
    )


def equal_importance(model: PreTrainedModel) -> Importance:
    """What `measure_importance` gives where all parts matter alike. It needs the modules of a model and no weights."""
    anatomy = Anatomy.of(model)
    if anatomy.layers is None:
        raise InputError(f"the layers of {anatomy.name} do not stand in one list, so none can be taken out")
    width, size = anatomy.hidden_size, head_size(anatomy)
    outputs = {n: _linear(layer, "self_attn", "o_proj") for n, layer in enumerate(anatomy.layers)}
    outputs = {n: each for n, each in outputs.items() if each and each.in_features % size == 0}
    downs = {n: _linear(layer, "mlp", "down_proj") for n, layer in enumerate(anatomy.layers)}
    return Importance(
        layers=torch.ones(len(anatomy.layers)),
        heads={
            n: torch.ones(each.in_features // size)
            for n, each in outputs.items()
            if each and not each.in_features % size
        },
        neurons={n: torch.ones(each.in_features) for n, each in downs.items() if each},
        directions=torch.ones(width),
        energies={name: torch.ones(width) for name in stream_norms(model, width)},
    )


def head_size(anatomy: Anatomy) -> int:
    """Dimensions of one attention head."""
    text = anatomy.text
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def stream_norms(model: PreTrainedModel, width: int) -> dict[str, nn.Module]:
    """The norms over the whole width: modules whose only parameters are vectors as wide as the stream."""
    return {
        name: module
        for name, module in model.named_modules()
        if (parameters := list(module.parameters()))
        and not list(module.children())
        and all(weight.shape == (width,) for weight in parameters)
    }


Watched = Callable[[Tensor, Tensor], Float[Tensor, "tokens some"]]
"""Figures per token, of the input and the output of a module."""


@dataclass(kw_only=True)
class _Means:
    """Running sums of figures, which change in place while hooks are set."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    hooks: list[RemovableHandle] = field(default_factory=list)

    def watch(self, module: nn.Module, name: str, figures: Watched) -> None:
        """Add the figures of each call of a module."""

        def hook(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            before = args[0] if args else named["hidden_states"]
            after = output if isinstance(output, Tensor) else output[0]
            rows = figures(before.reshape(-1, before.shape[-1]), after.reshape(-1, after.shape[-1])).double()
            self.sums[name] = self.sums.get(name, 0) + rows.sum(0)
            self.counts[name] = self.counts.get(name, 0) + len(rows)

        self.hooks.append(module.register_forward_hook(hook, with_kwargs=True))

    def stop(self) -> None:
        """Take the hooks away."""
        for hook in self.hooks:
            hook.remove()

    def __contains__(self, key: tuple[str, object]) -> bool:
        return f"{key[0]} {key[1]}" in self.sums

    def __getitem__(self, key: tuple[str, object]) -> Tensor:
        name = f"{key[0]} {key[1]}"
        return (self.sums[name] / self.counts[name]).cpu()


def _linear(layer: nn.Module, *path: str) -> nn.Linear | None:
    module: Any = layer
    for name in path:
        module = getattr(module, name, None)
    return module if isinstance(module, nn.Linear) else None


def _influence(before: Float[Tensor, "tokens width"], after: Float[Tensor, "tokens width"]) -> Tensor:
    return 1 - torch.cosine_similarity(before.double(), after.double(), dim=-1)[:, None]


def _energy(before: Float[Tensor, "tokens width"], after: Float[Tensor, "tokens width"]) -> Tensor:
    return before.double() ** 2


def _size(before: Float[Tensor, "tokens width"], after: Float[Tensor, "tokens width"]) -> Tensor:
    return after.abs()


@dataclass(frozen=True, kw_only=True)
class _HeadNorms:
    output: nn.Linear
    size: int

    def __call__(self, before: Float[Tensor, "tokens inner"], after: Float[Tensor, "tokens width"]) -> Tensor:
        columns = self.output.weight.split(self.size, dim=1)
        parts = zip(before.split(self.size, dim=-1), columns, strict=True)
        return torch.stack([(part @ column.T).float().norm(dim=-1) for part, column in parts], dim=-1)


@dataclass(frozen=True, kw_only=True)
class _NeuronNorms:
    norms: Float[Tensor, " neurons"]

    def __call__(self, before: Float[Tensor, "tokens neurons"], after: Float[Tensor, "tokens width"]) -> Tensor:
        return before.abs() * self.norms
