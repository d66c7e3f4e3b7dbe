"""A model of a changed config that takes its weights from another model."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from outrider.core.types import InputError
from outrider.lm.hf.open import reason_of


def rebuilt(model: PreTrainedModel, config: PreTrainedConfig, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    """A model of a config with these weights, on the device and in the dtype of another model.

    Args:
        model: Gives device, dtype, the way that attention and experts are computed, and the settings of `generate`.
        weights: A tensor for each name of the new model's `state_dict`.

    Raises:
        InputError: transformers refuses the config, or a weight is missing, too many, or of another shape.
    """
    kept = torch.random.get_rng_state()
    text = model.config.get_text_config(decoder=True)
    try:
        # A changed config is checked when it is read, not when a model is made of it.
        type(config).from_dict(config.to_dict())
        fresh = AutoModelForCausalLM.from_config(
            config,
            dtype=model.dtype,
            attn_implementation=text._attn_implementation,
            experts_implementation=getattr(text, "_experts_implementation", None),
        )
    except Exception as error:
        raise InputError(f"{config.model_type} cannot have these sizes: {reason_of(error)}") from error
    # Random weights were drawn, which nobody asked for.
    torch.random.set_rng_state(kept)
    fresh = fresh.to(model.device)
    wanted = {name: weight.shape for name, weight in fresh.state_dict().items()}
    odd = [name for name in wanted if name not in weights or weights[name].shape != wanted[name]]
    if odd or wanted.keys() != weights.keys():
        first = next(iter(odd or weights.keys() - wanted.keys()))
        raise InputError(f"{config.model_type} cannot be cut to these sizes: how to cut {first} is not known")
    fresh.load_state_dict(dict(weights))
    fresh.tie_weights()
    if model.generation_config is not None:
        fresh.generation_config = copy.deepcopy(model.generation_config)
    return fresh.eval()
