"""A draft model that is cut out of a target to a smaller shape."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from outrider.core.types import InputError
from outrider.lm.hf.anatomy import Anatomy
from outrider.surgery.importance import Importance, equal_importance, head_size, measure_importance, stream_norms
from outrider.surgery.rebuilt import rebuilt
from outrider.surgery.shape import ModelShape, config_of, shape_of
from outrider.surgery.texts import Progress, Texts

_ROLES = {
    "q_proj": ("query", "width"),
    "k_proj": ("key", "width"),
    "v_proj": ("key", "width"),
    "o_proj": ("width", "query"),
    "gate_proj": ("neurons", "width"),
    "up_proj": ("neurons", "width"),
    "down_proj": ("width", "neurons"),
}
"""What the rows and the columns of a linear layer belong to, in Llama and the models that took its names."""


@dataclass(frozen=True, kw_only=True)
class PrunedShape:
    """A model of a smaller shape.

    Attributes:
        model: The model.
        shape: Its shape.
        layers: The old layers that it keeps.
        importance: What was measured on the text.
    """

    model: PreTrainedModel
    shape: ModelShape
    layers: list[int]
    importance: Importance


def prune_shape(
    model: PreTrainedModel,
    texts: Texts,
    shape: ModelShape,
    progress: Progress | None = None,
    importance: Importance | None = None,
) -> PrunedShape:
    r"""A copy of a model with fewer layers, heads, neurons or a narrower stream: the parts that matter on a text.

    `Importance` says how each part is measured. Layers are taken out whole. Heads and neurons are chosen in each layer
    by itself. Coordinates of the residual stream are the same ones everywhere. After n of N coordinates a norm divides
    by another root mean square; its weights are multiplied by $\sqrt{r N / n}$, where r is the share of the squares
    that the kept coordinates have on the text.

    The result knows what it kept, and no more: it is a start for training, and a draft model only after it.
    With nothing taken out, the logits stay the same, bit for bit.

    Args:
        model: Is read and stays as it is.
        texts: Of the task that the draft model is for, as token ids.
        shape: What is wanted, from `smaller_shape`.
        importance: What `measure_importance` said of the model on the texts; by default it is measured.

    Raises:
        InputError: The texts are empty; or the model keeps something else than Llama's linear layers and RMS norms
            where something is to be cut. Layers alone can be taken out of nearly every model.

    References:
        Yan, Agarwal and Venkataraman 2024, "Decoding Speculative Decoding". https://arxiv.org/abs/2402.01528
    """
    importance = importance or measure_importance(model, texts, progress)
    cut = _Cut(model=model, before=shape_of(model.config), shape=shape, importance=importance)
    config = config_of(model.config, shape, cut.layers)
    return PrunedShape(
        model=rebuilt(model, config, cut.weights()),
        shape=shape,
        layers=cut.layers,
        importance=importance,
    )


def check_shape(config: PreTrainedConfig, shape: ModelShape) -> None:
    """Raise InputError where `prune_shape` would, by the modules of a model alone: no weights are read or made."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).eval()
    cut = _Cut(model=model, before=shape_of(config), shape=shape, importance=equal_importance(model))
    weights = cut.weights()
    with torch.device("meta"):
        rebuilt(model, config_of(config, shape, cut.layers), weights)


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """Which parts of a model are kept."""

    model: PreTrainedModel
    before: ModelShape
    shape: ModelShape
    importance: Importance

    @property
    def layers(self) -> list[int]:
        """The kept layers in order."""
        return _largest(self.importance.layers, self.shape.layers)

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """The weights of the new model by their names in it."""
        anatomy = Anatomy.of(self.model)
        modules = {id(module): name for name, module in self.model.named_modules()}
        place = modules[id(anatomy.layers)]
        renamed = {old: new for new, old in enumerate(self.layers)}
        width = _largest(self.importance.directions, self.shape.width)
        scales = self._scales(width)
        vocabulary_modules = {
            modules[id(e)] for e in (self.model.get_input_embeddings(), self.model.get_output_embeddings()) if e
        }
        weights: dict[str, Tensor] = {}
        for name, weight in self.model.state_dict().items():
            module = name.rpartition(".")[0]
            layer = _number(name, place)
            if layer is not None and layer not in renamed:
                continue
            kept = {"width": width} | ({} if layer is None else self._inside(layer))
            if module in vocabulary_modules:
                roles: Sequence[str] = ("", "width")
            elif module in scales:
                roles, weight = ("width",), weight * scales[module]
            else:
                roles = _ROLES.get(module.rpartition(".")[2], ())
            new = name if layer is None else f"{place}.{renamed[layer]}{name[len(f'{place}.{layer}') :]}"
            weights[new] = _taken(weight, roles[: weight.dim()], kept)
        return weights

    def _inside(self, layer: int) -> dict[str, list[int]]:
        """The kept rows of the heads and neurons of a layer."""
        kept: dict[str, list[int]] = {}
        before, after, size = self.before, self.shape, head_size(Anatomy.of(self.model))
        if (after.heads, after.key_value_heads) != (before.heads, before.key_value_heads):
            norms = self._measured(self.importance.heads, layer, before.heads, "attention heads", "self_attn.o_proj")
            groups = norms.view(before.key_value_heads, -1)
            chosen = _largest(groups.sum(1), after.key_value_heads)
            each = after.heads // after.key_value_heads
            heads = [g * groups.shape[1] + h for g in chosen for h in _largest(groups[g], each)]
            kept |= {"query": _rows(heads, size), "key": _rows(chosen, size)}
        if after.feed_forward != before.feed_forward:
            norms = self._measured(self.importance.neurons, layer, before.feed_forward, "neurons", "mlp.down_proj")
            kept["neurons"] = _largest(norms, after.feed_forward)
        return kept

    def _measured(self, norms_by_layer: dict[int, Tensor], layer: int, count: int, what: str, where: str) -> Tensor:
        norms = norms_by_layer.get(layer)
        if norms is None or len(norms) != count:
            name = self.model.config.model_type
            raise InputError(f"layer {layer} of {name} has no {where} over {count} {what}, so none can be taken out")
        return norms

    def _scales(self, width: list[int]) -> dict[str, float]:
        """The factor of each norm's weights; empty where the width stays."""
        if len(width) == self.before.width:
            return {}
        scales = {}
        for name, norm in stream_norms(self.model, self.before.width).items():
            if not _is_rms(norm):
                raise InputError(
                    f"{self.model.config.model_type} normalises in a way that depends on the width ({name}), so its "
                    "width must stay; layers, heads and feed-forward can be lowered"
                )
            squares = self.importance.energies[name]
            share = float(squares[width].sum() / squares.sum())
            scales[name] = (share * self.before.width / len(width)) ** 0.5
        return scales


def _taken(weight: Tensor, roles: Sequence[str], kept: dict[str, list[int]]) -> Tensor:
    """The kept rows and columns of a weight."""
    for axis, role in enumerate(roles):
        if role in kept and len(kept[role]) != weight.shape[axis]:
            weight = weight.index_select(axis, torch.tensor(kept[role], device=weight.device))
    return weight


def _largest(values: Float[Tensor, " n"], count: int) -> list[int]:
    """The places of the largest values, in order. Of equal ones the first."""
    return sorted(torch.argsort(values, descending=True, stable=True)[:count].tolist())


def _rows(heads: Sequence[int], size: int) -> list[int]:
    return [head * size + i for head in heads for i in range(size)]


def _number(name: str, place: str) -> int | None:
    """The number of the layer that a weight belongs to; None outside of the layers."""
    rest = name.removeprefix(f"{place}.")
    return int(rest.partition(".")[0]) if rest != name else None


@torch.no_grad()
def _is_rms(norm: nn.Module) -> bool:
    """Whether a norm divides by the root mean square and multiplies with its weight, found by trying it."""
    parameters = dict(norm.named_parameters())
    if list(parameters) != ["weight"]:
        return False
    weight: Tensor = parameters["weight"]
    if weight.is_meta:
        norm = copy.deepcopy(norm).to_empty(device="cpu")
        weight = dict(norm.named_parameters())["weight"].fill_(0.5)
    dice = torch.Generator().manual_seed(0)
    states = 10 * torch.randn(4, len(weight), generator=dice).to(weight) + 5
    wanted = states / states.float().pow(2).mean(-1, keepdim=True).sqrt() * weight
    return torch.allclose(norm(states).float(), wanted.float(), rtol=2e-2, atol=2e-2)
