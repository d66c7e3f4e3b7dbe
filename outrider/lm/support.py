"""Which models cannot be driven by slots and explicit masks, and why."""

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from outrider.lm import alibi, flex
from outrider.lm.attention import LAYER_TYPES, NO_ATTENTION, RECURRENT_TYPES

STEPWISE = ("mamba", "falcon_mamba", "jamba", "zamba", "recurrent_gemma")
"""Models that forget their state when it is continued by more than one token (their scans take no initial state)."""
_UNKNOWN_STATES = {
    "rwkv": "keeps its states in a way of its own",
    "xlstm": "keeps its states in a way of its own",
    "minimax": "keeps its states in a way of its own",
}
_EAGER_ONLY = ("gemma2", "gpt_oss")
_SINKS = ("gpt_oss", "granite_swa", "granitemoe_swa", "flint")
"""Models that transformers lets run with `flex_attention` and that add a sink to the softmax."""
_BY_PLACE = {
    "gpt_neo": "masks keys by their place in the cache, whatever mask it is given",
    "inkling_text": "adds a bias by distance in the cache",
    "inkling2_text": "adds a bias by distance in the cache",
}


def refusal(model_or_config: PreTrainedModel | PreTrainedConfig, *, max_context: int | None = None) -> str | None:
    """Why a model cannot be used, in one sentence; None if it can.

    Args:
        model_or_config: A model says more than a config: a config does not know yet how attention will be computed.
        max_context: Longest context wanted; None takes any that works.

    Example:
        >>> from transformers import LlamaConfig, MptConfig
        >>> refusal(LlamaConfig())
        >>> print(refusal(MptConfig()))
        mpt adds a bias by distance in the cache (ALiBi), which is wrong for trees
    """
    if isinstance(model_or_config, PreTrainedModel):
        return _refusal(model_or_config.config, type(model_or_config), max_context)
    kind = _causal_class(model_or_config)
    if kind is None:
        return f"{model_or_config.model_type} is no causal language model that transformers knows"
    return _refusal(model_or_config, kind, max_context)


def is_recurrent(model_or_config: PreTrainedModel | PreTrainedConfig) -> bool:
    """Whether any layer keeps a state that is a fold over the text, so that `RecurrentModel` is needed.

    Example:
        >>> from transformers import LlamaConfig, Mamba2Config
        >>> is_recurrent(Mamba2Config()), is_recurrent(LlamaConfig())
        (True, False)
    """
    if isinstance(model_or_config, PreTrainedModel):
        return _stateful(model_or_config.config, type(model_or_config))
    return _stateful(model_or_config, _causal_class(model_or_config))


def is_stepwise(config: PreTrainedConfig) -> bool:
    """Whether a recurrent model is known to continue its state rightly by one token at a time only."""
    return config.get_text_config(decoder=True).model_type in STEPWISE


def _refusal(config: PreTrainedConfig, kind: type[PreTrainedModel], max_context: int | None) -> str | None:
    found = (check(config, kind) for check in REFUSALS.values())
    return next((reason for reason in found if reason is not None), None) or _too_long(config, max_context)


def longest_context(config: PreTrainedConfig) -> int | None:
    """The longest context in tokens: what the model was made for, and what can be driven from outside; None: any."""
    own = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return min((n for n in (own, context_limit(config)) if n is not None), default=None)


def context_limit(config: PreTrainedConfig) -> int | None:
    """The longest context in which a model can be driven from outside, beyond what it was trained for; None: any.

    longrope embeds ALL positions anew once a text is longer than the original context. Llama 4 scales queries by
    positions that it does not take from `position_ids` but counts from the length of a cache that all rows share; the
    scale is 1 until `floor_scale`.
    """
    return min((limit for limit, _ in _limits(config)), default=None)


def _causal_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    found = AutoModelForCausalLM._model_mapping.get(type(config), None)
    return found[0] if isinstance(found, tuple) else found


def _encoder(config: PreTrainedConfig, kind: type[PreTrainedModel]) -> str | None:
    if config.is_encoder_decoder:
        return f"{config.model_type} is an encoder-decoder model; a decoder-only causal language model is needed"
    if getattr(config.get_text_config(decoder=True), "add_cross_attention", False):
        return f"{config.model_type} attends to an encoder (add_cross_attention); a decoder-only model is needed"
    return None


def _bidirectional(config: PreTrainedConfig, kind: type[PreTrainedModel]) -> str | None:
    text = config.get_text_config(decoder=True)
    if getattr(text, "use_bidirectional_attention", False) in (True, "all"):
        return (
            f"{config.model_type} attends to later tokens (use_bidirectional_attention); it does not generate from "
            "left to right"
        )
    if getattr(text, "is_decoder", None) is False and "create_bidirectional_mask" in vars(sys.modules[kind.__module__]):
        return (
            f"{config.model_type} attends to later tokens unless its config says is_decoder=True; if it was trained to "
            "generate from left to right, load it with that"
        )
    return None


def _places(config: PreTrainedConfig, kind: type[PreTrainedModel]) -> str | None:
    how = _BY_PLACE.get(config.get_text_config(decoder=True).model_type)
    return None if how is None else f"{config.model_type} {how}, which is wrong where rows differ in length"


def _positions(config: PreTrainedConfig, kind: type[PreTrainedModel]) -> str | None:
    if any(
        hasattr(thing, "create_position_ids_from_input_ids") for thing in vars(sys.modules[kind.__module__]).values()
    ):
        return (
            f"{config.model_type} finds positions by counting the tokens that are not padding, from its padding "
            "token's id on, and takes positions from outside otherwise"
        )
    return None


def _alibi(config: PreTrainedConfig, kind: type[PreTrainedModel]) -> str | None:
    text = config.get_text_config(decoder=True)
    if text.model_type == "mpt" or (getattr(text, "alibi", False) and text.model_type not in alibi.MODELS):
        return f"{config.model_type} adds a bias by distance in the cache (ALiBi), which is wrong for trees"
    return None


def _states(config: PreTrainedConfig, kind: type[PreTrainedModel]) -> str | None:
    how = _UNKNOWN_STATES.get(config.get_text_config(decoder=True).model_type)
    return None if how is None else f"{config.model_type} has recurrent layers and {how}"


def _layers(config: PreTrainedConfig, kind: type[PreTrainedModel]) -> str | None:
    text = config.get_text_config(decoder=True)
    if not hasattr(text, "num_hidden_layers"):
        return f"{config.model_type} is no single stack of decoder layers (its config names no num_hidden_layers)"
    known = {*LAYER_TYPES, *RECURRENT_TYPES, *NO_ATTENTION}
    types = dict.fromkeys(getattr(text, "layer_types", None) or ())
    if strange := [t for t in types if t not in known]:
        return (
            f"{config.model_type} has layers of type {', '.join(strange)}; masks are known for {', '.join(LAYER_TYPES)}"
        )
    attention = {t for t in types if t not in NO_ATTENTION}
    kinds = (
        ({"hybrid"}, {"hybrid", "full_attention"}) if "hybrid" in types else ({"full_attention", "sliding_attention"},)
    )
    if _stateful(config, kind) and not any(attention <= known for known in kinds):
        return (
            f"{config.model_type} has recurrent layers beside attention of kinds {', '.join(sorted(attention))}; "
            "supported are full_attention and sliding_attention, or hybrid layers that all look back to the beginning"
        )
    if getattr(text, "index_topk", None):
        return f"{config.model_type} picks keys by an index (index_topk), which needs a cache of its own"
    return None


def _signature(config: PreTrainedConfig, kind: type[PreTrainedModel]) -> str | None:
    known = inspect.signature(kind.forward).parameters
    types = getattr(config.get_text_config(decoder=True), "layer_types", None) or ("full_attention",)
    needed = ["past_key_values", "position_ids", "logits_to_keep"]
    if _stateful(config, kind) and "cache_params" in known:
        needed[0] = "cache_params"
    if all(t in NO_ATTENTION for t in types) or config.model_type in alibi.MODELS:
        needed.remove("position_ids")
    if missing := [n for n in needed if n not in known]:
        return f"{kind.__name__}.forward takes no {', '.join(missing)}, without which it cannot be driven from outside"
    return None


def _kernel(config: PreTrainedConfig, kind: type[PreTrainedModel]) -> str | None:
    text = config.get_text_config(decoder=True)
    kernel = text._attn_implementation
    capped = getattr(text, "attn_logit_softcapping", None) is not None
    without = text is config and not kind._supports_sdpa
    eager_only = text.model_type in _EAGER_ONLY or capped or without
    others = "'eager'" if eager_only else "'sdpa' or 'eager'"
    if kernel not in (None, "sdpa", "eager", "flex_attention"):
        return (
            f"attention implementation '{kernel}' takes no 4-D mask; load the model with attn_implementation={others}"
        )
    if flex.is_flex(config) and (reason := _flexless(config, kind)) is not None:
        return (
            f"attention implementation 'flex_attention' cannot be used with {config.model_type}, which {reason}; "
            f"load the model with attn_implementation={others}"
        )
    if kernel == "sdpa" and eager_only:
        return (
            f"attention implementation 'sdpa' computes {config.model_type} wrongly (no soft-cap, no sinks); "
            "load the model with attn_implementation='eager'"
        )
    return None


def _flexless(config: PreTrainedConfig, kind: type[PreTrainedModel]) -> str | None:
    if not kind._supports_flex_attn:
        return "transformers does not run so"
    if config.get_text_config(decoder=True).model_type in _SINKS:
        return "has attention sinks (transformers adds them on GPUs only, where that has not been tried)"
    if _stateful(config, kind):
        return "hands the mask to recurrent layers too, and they cannot read one of its kind"
    return None


def _dynamic(config: PreTrainedConfig, kind: type[PreTrainedModel]) -> str | None:
    if any(_type(p) == "dynamic" for p in _rotary_parameters(config)):
        return f"{config.model_type} uses dynamic rotary scaling, which embeds cached tokens anew as text grows"
    return None


REFUSALS: Mapping[str, Callable[[PreTrainedConfig, type[PreTrainedModel]], str | None]] = {
    "encoder-decoder models": _encoder,
    "ALiBi other than Bloom's": _alibi,
    "recurrent layers with a cache of their own": _states,
    "keys known by their place in the cache": _places,
    "layers of unknown type": _layers,
    "a forward that cannot be driven from outside": _signature,
    "positions that depend on padding": _positions,
    "models that attend to later tokens": _bidirectional,
    "attention implementations without exact masks": _kernel,
    "dynamic rotary scaling": _dynamic,
}
"""What is refused, and the check that says why; in this order. Contexts beyond `context_limit` are refused too."""


def _too_long(config: PreTrainedConfig, max_context: int | None) -> str | None:
    for limit, reason in _limits(config):
        if max_context is not None and max_context > limit:
            return (
                f"{config.model_type} {reason} once text is longer than {limit} tokens, and max_context is "
                f"{max_context}; give max_context={limit} or less"
            )
    return None


def _stateful(config: PreTrainedConfig, kind: type[PreTrainedModel] | None) -> bool:
    types = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    return bool(getattr(kind, "_is_stateful", False)) or any(t in RECURRENT_TYPES for t in types)


def _limits(config: PreTrainedConfig) -> list[tuple[int, str]]:
    """Contexts beyond which something happens that cannot be steered from outside, and what happens."""
    text = config.get_text_config(decoder=True)
    limits = [
        (p["original_max_position_embeddings"], "embeds cached tokens anew (longrope)")
        for p in _rotary_parameters(config)
        if _type(p) == "longrope"
    ]
    if getattr(text, "attn_temperature_tuning", False):
        limits.append((text.floor_scale - 1, "scales queries by the length of the cache (attn_temperature_tuning)"))
    return limits


def _rotary_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The rotary settings, one per layer type where they differ."""
    text = config.get_text_config(decoder=True)
    given = getattr(text, "rope_parameters", None) or {}
    nested = [p for p in given.values() if isinstance(p, dict)]
    found = nested or [given]
    original = getattr(text, "original_max_position_embeddings", None) or getattr(text, "max_position_embeddings", None)
    return [{"original_max_position_embeddings": original, **p} for p in found]


def _type(parameters: dict[str, Any]) -> object:
    return parameters.get("rope_type", parameters.get("type"))
