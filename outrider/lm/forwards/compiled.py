"""Forwards compiled by torch when they are first called: those of models on GPUs, and those of heads."""

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.lm.forwards.eager import EagerForward
from outrider.lm.forwards.twin import twin
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.taps import attach
from outrider.lm.slots.slotted import Inputs, Outputs

COMPILED = 64
"""Most columns of a compiled forward. Longer forwards prefill prompts; they have many shapes and are rare."""

Run = Callable[..., tuple[Tensor, tuple[Tensor, ...]]]
"""A forward that returns logits and the tapped hidden states, in the order of the taps."""


class ReplayedForward:
    """A model's forwards on a GPU, replayed as CUDA graphs; one for each shape and choice of taps.

    Forwards of more than `COMPILED` columns, of prompts, are not compiled.

    Attributes:
        num_forwards: Compiled forwards made so far.

    Args:
        model: The model; its weights must not change afterwards.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._eager = model, EagerForward(model)
        self._by_taps: dict[tuple[int, ...], Run] = {}
        self.num_forwards = 0

    def __call__(self, inputs: Inputs, taps: Sequence[int]) -> Outputs:
        batch, wanted = inputs.batch, tuple(dict.fromkeys(taps))
        if batch.width > COMPILED or batch.prefill_only:
            return self._eager(inputs, taps)
        if wanted not in self._by_taps:
            self._by_taps[wanted] = self._compiled(wanted)
        # Where a view begins would become part of a graph. A graph computes all logits.
        logits, seen = self._by_taps[wanted](
            input_ids=batch.tokens(self._model.device).clone(),
            attention_mask=inputs.masks,
            position_ids=inputs.positions.clone(),
            past_key_values=inputs.window,
            use_cache=True,
            logits_to_keep=0,
        )
        self.num_forwards += 1
        # The next replay of a CUDA graph writes where this one's output lies.
        taken = {k: each.clone() for k, each in zip(wanted, seen, strict=True)}
        return Outputs(logits=logits.clone(), columns=np.arange(batch.width), taps=taken)

    def _compiled(self, taps: tuple[int, ...]) -> Run:
        model = twin(self._model) if taps else self._model
        seen: dict[int, Tensor] = {}
        attach(Anatomy.of(model).layers, taps, seen)

        def run(**inputs: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
            logits = model(**inputs).logits
            return logits, tuple(seen[k] for k in taps)

        return torch.compile(_own(run), dynamic=False, mode="reduce-overhead")


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
