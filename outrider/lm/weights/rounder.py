"""Models whose packed linear layers round what they multiply to 8 bits."""

import logging
from dataclasses import dataclass

from transformers import PreTrainedModel

from outrider.core.inputs import unknown
from outrider.core.types import InputError
from outrider.lm.hf.open import LOADING, level_of
from outrider.lm.weights.linear import BlockLinear, Int8Linear
from outrider.lm.weights.operators import rounds

ACTIVATIONS = ("bfloat16", "int8")
"""The values of the option."""
log = logging.getLogger(LOADING)


@dataclass(frozen=True)
class Rounder:
    """Lets packed linear layers multiply activations of 8 bits. Such a model is another one."""

    @classmethod
    def of(cls, activations: str) -> "Rounder | None":
        """The rounder for the value of an option; None where activations stay as they are.

        Raises:
            InputError: There is no such value.

        Example:
            >>> Rounder.of("int8"), Rounder.of("bfloat16")
            (Rounder(), None)
        """
        if activations not in ACTIVATIONS:
            raise unknown("activations", activations, ACTIVATIONS)
        return cls() if activations == "int8" else None

    def __call__(self, model: PreTrainedModel) -> PreTrainedModel:
        """The model, which is changed. Layers that share their weights do so afterwards.

        Raises:
            InputError: None of its linear layers is packed.
        """
        layers = {
            path: layer
            for path, layer in model.named_modules(remove_duplicate=False)
            if isinstance(layer, BlockLinear) and rounds(layer.kind)
        }
        if not layers:
            raise InputError(
                "activations=int8 rounds what packed weights are multiplied with, and "
                f"{model.name_or_path or 'this model'} has none here; name a GGUF file or a checkpoint of AWQ or GPTQ, "
                "or give weights=q8_0 or the like, on a CPU with a C++ compiler"
            )
        rounding = {layer: Int8Linear(layer.blocks, layer.bias) for layer in layers.values()}
        for path, layer in layers.items():
            model.set_submodule(path, rounding[layer])
        log.log(
            level_of(model),
            "its packed layers round activations to int8, in groups of 32: another model than with bfloat16",
        )
        return model.eval()
