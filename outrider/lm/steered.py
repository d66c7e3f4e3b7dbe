r"""A draft model whose feed-forward layers take vectors from outside, and the hooks that bring them in.

Relied on in transformers (read and run in 5.23): a gated feed-forward layer computes
$W_{down}(act(W_{gate} x) \cdot W_{up} x)$ with linear children `gate_proj`, `up_proj` and `down_proj`. Where one child
`gate_up_proj` computes both, the second half of its output is $W_{up} x$.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.core.types import InputError
from outrider.lm.forwards.forward import Forward, ForwardChoice
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.model import LanguageModel
from outrider.lm.slots.inputs import Inputs, Outputs

Deltas = Callable[[int], Float[Tensor, "rows columns width"]]
"""The vectors that are added in a layer, by the layer's number."""


@dataclass(frozen=True, kw_only=True)
class UpProjection:
    """The part of a decoder layer whose output vectors are added to: $W_{up} x$ of its feed-forward layer.

    Attributes:
        module: The linear layer that computes it.
        first: Where it begins in the output of this linear layer.
        width: How wide it is.
    """

    module: nn.Module
    first: int
    width: int


def up_projections(model: PreTrainedModel) -> list[UpProjection]:
    """The up projection of every decoder layer, in order.

    Raises:
        InputError: A layer has no gated feed-forward layer, or several.
    """
    anatomy = Anatomy.of(model)
    projections = [part for layer in anatomy.layers or () if (part := _up_projection(layer)) is not None]
    if not projections or len(projections) < anatomy.num_layers:
        raise InputError(
            f"{anatomy.name} cannot be steered: steering needs one gated feed-forward layer in each decoder layer, as "
            "Llama, Qwen, Mistral, Gemma and Phi-3 have it"
        )
    return projections


def _up_projection(layer: nn.Module) -> UpProjection | None:
    """The up projection of a layer; None if the layer has none, or several."""
    projections = []
    for module in layer.modules():
        parts = dict(module.named_children())
        if "experts" in parts:
            return None
        if {"gate_proj", "up_proj", "down_proj"} <= parts.keys():
            projections.append(UpProjection(module=parts["up_proj"], first=0, width=_width(parts["up_proj"])))
        elif {"gate_up_proj", "down_proj"} <= parts.keys():
            width = _width(parts["gate_up_proj"]) // 2
            projections.append(UpProjection(module=parts["gate_up_proj"], first=width, width=width))
    return projections[0] if len(projections) == 1 and projections[0].width else None


def _width(module: nn.Module) -> int:
    """Width of a linear layer's output; 0 where it does not say."""
    return int(getattr(module, "out_features", 0))


@contextmanager
def steered(parts: Sequence[UpProjection], deltas: Deltas) -> Iterator[None]:
    r"""Let each layer compute $W_{down}(act(W_{gate} x) \cdot (W_{up} x + \delta))$ while the body runs.

    Gradients flow into the vectors. The backward pass may follow later, but not with gradient checkpointing, which runs
    layers again after the body.
    """
    handles = [part.module.register_forward_hook(_Adds(part.first, layer, deltas)) for layer, part in enumerate(parts)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Adds:
    """Hook that adds a layer's vectors to the output of its up projection."""

    def __init__(self, first: int, layer: int, deltas: Deltas) -> None:
        self.first, self.layer, self.deltas = first, layer, deltas

    def __call__(self, _: nn.Module, __: tuple[object, ...], output: Tensor) -> Tensor:
        if not self.first:
            return output + self.deltas(self.layer)
        return torch.cat([output[..., : self.first], output[..., self.first :] + self.deltas(self.layer)], -1)


class SteeredLM(LanguageModel):
    """A language model whose segments may have features: the vectors of all layers, side by side, for each node.

    A node without a feature is read as the model itself reads it. Its forwards run eager, because packed and compiled
    forwards do not see hooks.

    Attributes:
        parts: The up projections.
        feature_size: Width of the features.

    Args:
        model: The model, on one device.
        max_slots: Most slots at once.
        max_context: Most tokens of one slot; by default as many as the model and free memory allow.
        vocab_size: Cut the logits to this width.

    Raises:
        InputError: The model cannot be supported or steered, or the cache does not fit in memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_slots: int = 8,
        max_context: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.parts = up_projections(model)
        self.feature_size = sum(part.width for part in self.parts)
        super().__init__(model, max_slots=max_slots, max_context=max_context, vocab_size=vocab_size)
        self.choice = ForwardChoice(forward="eager", pad_to=self.pad_to, reason="it is steered by hooks")

    def why_not(self, forward: Forward) -> str | None:
        if forward == "eager":
            return super().why_not(forward)
        return f"a steered draft model needs hooks, and {forward} forwards do not see hooks; choose forward=eager"

    def cast(self, dtype: torch.dtype) -> "SteeredLM":
        """A copy in another dtype. Returns itself if it already has that dtype or is quantised."""
        if self.dtype in (dtype, torch.float64) or getattr(self.model, "is_quantized", False):
            return self
        return SteeredLM(
            copy.deepcopy(self.model).to(dtype),
            max_slots=self.max_slots,
            max_context=self.max_context,
            vocab_size=self.vocab_size,
        )

    def _forward(self, inputs: Inputs, taps: Sequence[int]) -> Outputs:
        features = inputs.batch.features(self.device, self.dtype)
        if features is None:
            return super()._forward(inputs, taps)
        deltas = features.split([part.width for part in self.parts], -1)
        with steered(self.parts, deltas.__getitem__):
            return super()._forward(inputs, taps)
