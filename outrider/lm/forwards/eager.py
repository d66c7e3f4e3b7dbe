"""Forwards of a transformers model as it is, operation by operation."""

from collections.abc import Sequence
from contextlib import nullcontext

from transformers import PreTrainedModel

from outrider.core.ranks import rows_of_first
from outrider.host.meanwhile import hand_over
from outrider.lm.forwards.grouped import ALONE, LEAN, is_invariant, lean
from outrider.lm.hf import alibi, flex
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.cache_keyword import cache_keyword
from outrider.lm.hf.spread import copied_once, is_spread
from outrider.lm.hf.taps import tapped
from outrider.lm.slots.batch import upload
from outrider.lm.slots.inputs import Inputs, Outputs


class EagerForward:
    """Runs a model's own modules.

    Args:
        model: The model; its weights may change between forwards.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self._cache = model, cache_keyword(type(model))
        anatomy = Anatomy.of(model)
        self._layers, self._flex = anatomy.layers, anatomy.flex
        self._text, self._sdpa = anatomy.text, anatomy.attention == "sdpa"
        self._invariant = self._sdpa and is_invariant(model)
        self._spread, self._shared = is_spread(anatomy.layers), anatomy.num_processes > 1

    def __call__(self, inputs: Inputs, taps: Sequence[int]) -> Outputs:
        batch, columns, device = inputs.batch, inputs.columns, self.model.device
        some = None if len(columns) == batch.width else columns
        is_lean = self._sdpa and (inputs.causal or self._invariant or device.type != "cpu")
        hand_over()
        with (
            tapped(self._layers, taps) as seen,
            alibi.bias_in_mask(self.model),
            flex.uncompiled() if self._flex else nullcontext(),
            lean(self._text, ALONE if self._invariant else LEAN) if is_lean else nullcontext(),
            copied_once(self._layers, device) if self._spread and self._layers is not None else nullcontext(),
        ):
            logits = self.model(
                input_ids=batch.tokens(device),
                attention_mask=inputs.masks,
                position_ids=inputs.positions,
                use_cache=True,
                logits_to_keep=0 if some is None else upload([some], device)[0],
                **{self._cache: inputs.window},
            ).logits
        if self._spread:
            logits = logits.to(device)
            seen = {tap: states.to(device, non_blocking=True) for tap, states in seen.items()}
        if self._shared:
            logits, seen = rows_of_first(logits, seen)
        return Outputs(logits=logits, columns=columns, taps=seen)
