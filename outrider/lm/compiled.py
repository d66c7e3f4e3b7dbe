"""Forwards compiled by torch, with the hidden states that are tapped."""

import copy
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.lm.anatomy import Anatomy
from outrider.lm.taps import attach

COMPILED = 64
"""Most columns of a compiled forward. Longer forwards prefill prompts; they have many shapes and are rare."""

Run = Callable[..., tuple[Tensor, tuple[Tensor, ...]]]
"""A forward that returns logits and the tapped hidden states, in the order of the taps."""


class CompiledForwards:
    """A model's forward, compiled for each choice of taps when it is first called with them.

    On a CPU shapes are symbols, so that one graph serves all lengths (and another one row), and weights become
    constants that the kernel library lays out once. On a GPU shapes are fixed and forwards are replayed as CUDA graphs.

    Attributes:
        num_forwards: Forwards made so far.

    Args:
        model: The model; its weights must not change afterwards.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._replayed = model.device.type == "cuda"
        self._by_taps: dict[tuple[int, ...], Run] = {}
        self.num_forwards = 0

    def __call__(
        self, taps: Sequence[int], **inputs: Any
    ) -> tuple[Float[Tensor, "rows width vocab"], Mapping[int, Float[Tensor, "rows width hidden"]]]:
        """The logits and the tapped hidden states."""
        wanted = tuple(dict.fromkeys(taps))
        if wanted not in self._by_taps:
            self._by_taps[wanted] = self._compiled(wanted)
        logits, seen = self._by_taps[wanted](**inputs)
        self.num_forwards += 1
        if self._replayed:
            # The next replay of a CUDA graph writes where this one's output lies.
            logits, seen = logits.clone(), tuple(each.clone() for each in seen)
        return logits, dict(zip(wanted, seen, strict=True))

    def _compiled(self, taps: tuple[int, ...]) -> Run:
        model = self._model if not taps else _twin(self._model)
        seen: dict[int, Tensor] = {}
        attach(Anatomy.of(model).layers, taps, seen)

        def run(**inputs: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
            logits = model(**inputs).logits
            return logits, tuple(seen[k] for k in taps)

        if self._replayed:
            return torch.compile(_own(run), dynamic=False, mode="reduce-overhead")
        return torch.compile(_own(run), dynamic=True, options={"freezing": True})


def _twin(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that shares all weights, so that hooks on it are not hooks on the model."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    twin: PreTrainedModel = copy.deepcopy(model, shared)
    return twin


def _own(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with code of its own.

    torch keeps graphs by the code that they were made from. After eight graphs it runs that code uncompiled, without a
    word. Models and heads would share the eight.
    """
    assert isinstance(function, FunctionType)
    code = function.__code__.replace()
    return FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)


def compiled_head(module: nn.Module) -> Callable[..., Tensor]:
    """A head's forward, compiled like a model's."""

    def run(*inputs: Any, **named: Any) -> Any:
        return module(*inputs, **named)

    if next(module.parameters()).device.type == "cuda":
        return torch.compile(_own(run), dynamic=False)
    return torch.compile(_own(run), dynamic=True, options={"freezing": True})
