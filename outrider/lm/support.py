"""Which models cannot be driven by slots and explicit masks, and why."""

import inspect
from collections.abc import Sequence
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from outrider.lm.attention import LAYER_TYPES, NO_ATTENTION, RECURRENT_TYPES

STEPWISE = ("mamba", "falcon_mamba", "jamba", "zamba", "recurrent_gemma")
"""Models that forget their state when it is continued by more than one token (their scans take no initial state)."""
_UNKNOWN_STATES = {
    "rwkv": "keeps its states in a way of its own",
    "xlstm": "keeps its states in a way of its own",
    "minimax": "keeps its states in a way of its own",
}
_ALIBI = ("bloom", "mpt")
_EAGER_ONLY = ("gemma2", "gpt_oss")


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
    config = model_or_config.config if isinstance(model_or_config, PreTrainedModel) else model_or_config
    kind = type(model_or_config) if isinstance(model_or_config, PreTrainedModel) else _causal_class(model_or_config)
    types = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    return bool(getattr(kind, "_is_stateful", False)) or any(t in RECURRENT_TYPES for t in types)


def is_stepwise(config: PreTrainedConfig) -> bool:
    """Whether a recurrent model is known to continue its state rightly by one token at a time only."""
    return config.get_text_config(decoder=True).model_type in STEPWISE


def _refusal(config: PreTrainedConfig, kind: type[PreTrainedModel], max_context: int | None) -> str | None:
    if (reason := _family(config, kind)) is not None:
        return reason
    special = (_states if is_recurrent(config) or getattr(kind, "_is_stateful", False) else _masks)(config, kind)
    return special or _kernel(config, kind) or _context(config, max_context)


def _masks(config: PreTrainedConfig, kind: type[PreTrainedModel]) -> str | None:
    return _layers(config, LAYER_TYPES) or _signature(kind, ("past_key_values", "position_ids", "logits_to_keep"))


def _states(config: PreTrainedConfig, kind: type[PreTrainedModel]) -> str | None:
    text = config.get_text_config(decoder=True)
    if (how := _UNKNOWN_STATES.get(text.model_type)) is not None:
        return f"{config.model_type} has recurrent layers and {how}"
    attends = any(t not in NO_ATTENTION for t in getattr(text, "layer_types", None) or ())
    cache = "cache_params" if "cache_params" in inspect.signature(kind.forward).parameters else "past_key_values"
    needed = (cache, "position_ids") if attends else (cache,)
    return _layers(config, (*LAYER_TYPES, *RECURRENT_TYPES, *NO_ATTENTION)) or _signature(
        kind, (*needed, "logits_to_keep")
    )


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


def _family(config: PreTrainedConfig, kind: type[PreTrainedModel]) -> str | None:
    text, name = config.get_text_config(decoder=True), config.model_type
    if config.is_encoder_decoder:
        return f"{name} is an encoder-decoder model; a decoder-only causal language model is needed"
    if text.model_type in _ALIBI or getattr(text, "alibi", False):
        return f"{name} adds a bias by distance in the cache (ALiBi), which is wrong for trees"
    if getattr(text, "use_bidirectional_attention", False) in (True, "all"):
        return f"{name} attends to later tokens (use_bidirectional_attention); it does not generate from left to right"
    if getattr(text, "add_cross_attention", False):
        return f"{name} attends to an encoder (add_cross_attention); a decoder-only model is needed"
    return None


def _layers(config: PreTrainedConfig, known: Sequence[str]) -> str | None:
    text = config.get_text_config(decoder=True)
    strange = [t for t in dict.fromkeys(getattr(text, "layer_types", None) or ()) if t not in known]
    if strange:
        return (
            f"{config.model_type} has layers of type {', '.join(strange)}; masks are known for {', '.join(LAYER_TYPES)}"
        )
    if getattr(text, "index_topk", None):
        return f"{config.model_type} picks keys by an index (index_topk), which needs a cache of its own"
    return None


def _signature(kind: type[PreTrainedModel], needed: Sequence[str]) -> str | None:
    known = inspect.signature(kind.forward).parameters
    if missing := [n for n in needed if n not in known]:
        return f"{kind.__name__}.forward takes no {', '.join(missing)}, without which it cannot be driven from outside"
    return None


def _kernel(config: PreTrainedConfig, kind: type[PreTrainedModel]) -> str | None:
    text = config.get_text_config(decoder=True)
    kernel = text._attn_implementation
    if kernel not in (None, "sdpa", "eager"):
        return (
            f"attention implementation '{kernel}' takes no 4-D mask; "
            "load the model with attn_implementation='sdpa' or 'eager'"
        )
    capped = getattr(text, "attn_logit_softcapping", None) is not None
    if kernel == "sdpa" and (text.model_type in _EAGER_ONLY or capped or not kind._supports_sdpa):
        return (
            f"attention implementation 'sdpa' computes {config.model_type} wrongly (no soft-cap, no sinks); "
            "load the model with attn_implementation='eager'"
        )
    return None


def _context(config: PreTrainedConfig, max_context: int | None) -> str | None:
    if any(_type(p) == "dynamic" for p in _rotary_parameters(config)):
        return f"{config.model_type} uses dynamic rotary scaling, which embeds cached tokens anew as text grows"
    for limit, reason in _limits(config):
        if max_context is not None and max_context > limit:
            return (
                f"{config.model_type} {reason} once text is longer than {limit} tokens, and max_context is "
                f"{max_context}; give max_context={limit} or less"
            )
    return None


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
