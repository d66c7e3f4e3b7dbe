"""The multi-token-prediction layers that a target ships with, as transformers builds and loads them.

Relied on in transformers (read and run in 5.23):

- `config.num_mtp_layers` counts them, and `MtpModel.from_pretrained(model)` reads them from `config.name_or_path`;
- it loads them in `config.dtype`, which stays what it was when the model is cast;
- it knows their names from `model._keys_to_ignore_on_load_unexpected`, where some classes list the layer numbers of the
  published checkpoints alone;
- `MtpModel.layers`, `shared_post_norm`, `rotary_emb` and `has_per_layer_rope` are what its forward uses of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel, modeling_layers

from outrider.core.types import InputError

ATTENTION = (None, "full_attention", "sliding_attention")
"""The types of layers that keep nothing but keys and values."""


def load_mtp(model: PreTrainedModel, path: str | None = None) -> Any:
    """The `MtpModel` of a target, with the weights of its checkpoint, on the target's device.

    Args:
        model: The target. It shares its embedding, its output layer and its rotary tables.
        path: Directory or hub id of the checkpoint; None: the one that the target was loaded from.

    Raises:
        InputError: The target has no such layers, transformers cannot load them, or they cannot be run by slots.
    """
    name, text = model.config.model_type, model.config.get_text_config(decoder=True)
    if not getattr(text, "num_mtp_layers", None):
        if getattr(text, "num_nextn_predict_layers", None):
            raise InputError(
                f"transformers cannot load the multi-token-prediction layers of {name}; use another drafter, such as "
                "suffix"
            )
        raise InputError(
            f"{name} has no multi-token-prediction layers (its config names no num_mtp_layers), so it cannot draft by "
            "mtp; use another drafter, such as suffix"
        )
    if not hasattr(modeling_layers, "MtpModel"):
        raise InputError("drafter mtp needs a newer transformers, one that has MtpModel; 5.23 has it")
    place = path or model.config.name_or_path
    if not place:
        raise InputError("the target was not loaded from a checkpoint, so say where its layers are: mtp:path=...")
    if not model._supports_sdpa:
        raise InputError(f"the multi-token-prediction layers of {name} need attention without masks of our own")
    try:
        with _named_after(model, place):
            layers = modeling_layers.MtpModel.from_pretrained(model, device_map={"": model.device})
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise InputError(
            f"transformers cannot load the multi-token-prediction layers of {name} from {place}: {lines[0]}"
        ) from error
    kinds = getattr(layers.config, "layer_types", None) or (None,)
    if strange := [kind for kind in kinds if kind not in ATTENTION]:
        raise InputError(
            f"the multi-token-prediction layers of {name} are of type {strange[0]}, which keeps more than keys and "
            "values; use another drafter, such as suffix"
        )
    layers.config._attn_implementation = "sdpa"
    return layers


def behind_pattern(model: PreTrainedModel) -> str:
    """A pattern for the names of tensors of multi-token-prediction layers that stand behind a model's own layers in its
    checkpoint; empty where its config names no such layers.
    """
    text = model.config.get_text_config(decoder=True)
    count, first = getattr(text, "num_mtp_layers", None) or 0, getattr(text, "num_hidden_layers", 0)
    return "|".join(rf"\.layers\.{number}\." for number in range(first, first + count))


@contextmanager
def _named_after(model: PreTrainedModel, place: str) -> Iterator[None]:
    """Inside it, the model's config names the checkpoint and the type that the weights have by now, and its MTP layers
    are known to stand behind its own layers.
    """
    config, known = model.config, model._keys_to_ignore_on_load_unexpected
    before, dtype = config.name_or_path, config.dtype
    config.name_or_path, config.dtype = place, model.dtype
    model._keys_to_ignore_on_load_unexpected = [*(known or ()), behind_pattern(model)]
    try:
        yield
    finally:
        config.name_or_path, config.dtype = before or "", dtype
        model._keys_to_ignore_on_load_unexpected = known
