"""The multi-token-prediction layers that a target ships with, as transformers builds and loads them.

Relied on in transformers (read and run in 5.23):

- `config.num_mtp_layers` counts them, `config.mtp_layer_types` has their types if the target has layers of several,
  and `MtpModel.from_pretrained(model)` reads them from `config.name_or_path`;
- it loads them in `config.dtype`, which stays what it was when the model is cast;
- it knows their names from `model._keys_to_ignore_on_load_unexpected`, where some classes list the layer numbers of the
  published checkpoints alone;
- `MtpModel.layers`, `shared_post_norm`, `rotary_emb` and `has_per_layer_rope` are what its forward uses of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers
from packaging.version import Version
from transformers import PreTrainedConfig, PreTrainedModel, modeling_layers

from outrider.core.types import InputError

BESIDE = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Model types whose configs in transformers know of no such layers. Checkpoints have them as `mtp.*`, and they attend
to all positions. Qwen3.6 has the types of Qwen3.5."""
SINCE = Version("5.20")
"""The first transformers whose `MtpModel` is as it is here."""
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
    if not _num_layers(text):
        if name.startswith("mimo"):
            raise InputError(
                f"the multi-token-prediction layers of {name} have a layout of their own, with the hidden state first, "
                "which transformers does not load; use another drafter, such as suffix"
            )
        if getattr(text, "num_nextn_predict_layers", None):
            raise InputError(
                f"transformers cannot load the multi-token-prediction layers of {name}; use another drafter, such as "
                "suffix"
            )
        raise InputError(
            f"{name} has no multi-token-prediction layers (its config names no num_mtp_layers), so it cannot draft by "
            "mtp; use another drafter, such as suffix"
        )
    if Version(transformers.__version__) < SINCE:
        raise InputError(
            f"drafter mtp needs transformers {SINCE} or later, and {transformers.__version__} is here; use another "
            "drafter, such as suffix"
        )
    if getattr(text, "mtp_use_dedicated_embeddings", False):
        raise InputError(
            f"the multi-token-prediction layers of {name} have embeddings of their own, which transformers does not "
            "load; use another drafter, such as suffix"
        )
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


def _num_layers(text: PreTrainedConfig) -> int:
    """How many such layers a config names; 0 for none. A config of Qwen3-Next that names no number means one."""
    if not (count := getattr(text, "num_mtp_layers", None)) and text.model_type in BESIDE:
        named = (getattr(text, name, None) for name in ("mtp_num_hidden_layers", "num_nextn_predict_layers"))
        count = next((value for value in named if value is not None), int(text.model_type == "qwen3_next"))
    return count or 0


def behind_pattern(model: PreTrainedModel) -> str:
    """A pattern for the names of tensors of multi-token-prediction layers that stand behind a model's own layers in its
    checkpoint; empty where its config names no such layers.
    """
    text = model.config.get_text_config(decoder=True)
    count, first = getattr(text, "num_mtp_layers", None) or 0, getattr(text, "num_hidden_layers", 0)
    return "|".join(rf"\.layers\.{number}\." for number in range(first, first + count))


@contextmanager
def _named_after(model: PreTrainedModel, place: str) -> Iterator[None]:
    """Inside it, the model's config names the checkpoint, the type that the weights have by now, and the MTP layers.
    Those that stand behind the model's own layers are known as such.
    """
    config, known = model.config, model._keys_to_ignore_on_load_unexpected
    before, dtype, text = config.name_or_path, config.dtype, config.get_text_config(decoder=True)
    config.name_or_path, config.dtype = place, model.dtype
    count = _num_layers(text) if text.model_type in BESIDE else 0
    fields = {"num_mtp_layers": count, "mtp_layer_types": ["full_attention"] * count}
    added = [name for name in fields if count and not getattr(text, name, None)]
    for name in added:
        setattr(text, name, fields[name])
    model._keys_to_ignore_on_load_unexpected = [*(known or ()), behind_pattern(model)]
    try:
        yield
    finally:
        for name in added:
            delattr(text, name)
        config.name_or_path, config.dtype = before or "", dtype
        model._keys_to_ignore_on_load_unexpected = known
