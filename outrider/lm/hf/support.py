"""Which models cannot be driven by slots and explicit masks, and why."""

import inspect
import sys
from collections.abc import Callable, Mapping

import torch.distributed as dist
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.lm.hf import alibi
from outrider.lm.hf.anatomy import LAYER_TYPES, NO_ATTENTION, RECURRENT_TYPES, Anatomy, rotary_parameters, rotary_type
from outrider.lm.hf.cache_keyword import find_cache_keyword

CHAINS_ONLY = "has recurrent layers, whose state follows one text and cannot read a branching tree; use tree 'chain'"
"""The reason why a model with recurrent layers cannot read a branching tree."""

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


def refusal(
    model_or_config: PreTrainedModel | PreTrainedConfig | Anatomy, *, max_context: int | None = None
) -> str | None:
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
    anatomy = model_or_config if isinstance(model_or_config, Anatomy) else Anatomy.of(model_or_config)
    if anatomy.kind is None:
        return _encoder(anatomy) or f"{anatomy.name} is no causal language model that transformers knows"
    reasons = (check(anatomy, anatomy.kind) for check in REFUSALS.values())
    return next((reason for reason in reasons if reason is not None), None) or _too_long(anatomy, max_context)


def _encoder(model: Anatomy, kind: type[PreTrainedModel] | None = None) -> str | None:
    if model.config.is_encoder_decoder:
        return f"{model.name} is an encoder-decoder model; a decoder-only causal language model is needed"
    if getattr(model.text, "add_cross_attention", False):
        return f"{model.name} attends to an encoder (add_cross_attention); a decoder-only model is needed"
    return None


def _bidirectional(model: Anatomy, kind: type[PreTrainedModel]) -> str | None:
    if getattr(model.text, "use_bidirectional_attention", False) in (True, "all"):
        return (
            f"{model.name} attends to later tokens (use_bidirectional_attention); it does not generate from "
            "left to right"
        )
    if getattr(model.text, "is_decoder", None) is False and "create_bidirectional_mask" in vars(
        sys.modules[kind.__module__]
    ):
        return (
            f"{model.name} attends to later tokens unless its config says is_decoder=True; if it was trained to "
            "generate from left to right, load it with that"
        )
    return None


def _places(model: Anatomy, kind: type[PreTrainedModel]) -> str | None:
    how = _BY_PLACE.get(model.text_name)
    return None if how is None else f"{model.name} {how}, which is wrong where rows differ in length"


def _positions(model: Anatomy, kind: type[PreTrainedModel]) -> str | None:
    if any(
        hasattr(thing, "create_position_ids_from_input_ids") for thing in vars(sys.modules[kind.__module__]).values()
    ):
        return (
            f"{model.name} finds positions by counting the tokens that are not padding, from its padding "
            "token's id on, and takes positions from outside otherwise"
        )
    return None


def _alibi(model: Anatomy, kind: type[PreTrainedModel]) -> str | None:
    if model.text_name == "mpt" or (getattr(model.text, "alibi", False) and model.text_name not in alibi.MODELS):
        return f"{model.name} adds a bias by distance in the cache (ALiBi), which is wrong for trees"
    return None


def _states(model: Anatomy, kind: type[PreTrainedModel]) -> str | None:
    how = _UNKNOWN_STATES.get(model.text_name)
    return None if how is None else f"{model.name} has recurrent layers and {how}"


def _layers(model: Anatomy, kind: type[PreTrainedModel]) -> str | None:
    if not hasattr(model.text, "num_hidden_layers"):
        return f"{model.name} is no single stack of decoder layers (its config names no num_hidden_layers)"
    known = {*LAYER_TYPES, *RECURRENT_TYPES, *NO_ATTENTION}
    types = dict.fromkeys(model.layer_types)
    if strange := [t for t in types if t not in known]:
        return f"{model.name} has layers of type {', '.join(strange)}; masks are known for {', '.join(LAYER_TYPES)}"
    attention = {t for t in types if t not in NO_ATTENTION}
    kinds = (
        ({"hybrid"}, {"hybrid", "full_attention"}) if "hybrid" in types else ({"full_attention", "sliding_attention"},)
    )
    if model.recurrent and not any(attention <= known for known in kinds):
        return (
            f"{model.name} has recurrent layers beside attention of kinds {', '.join(sorted(attention))}; "
            "supported are full_attention and sliding_attention, or hybrid layers that all look back to the beginning"
        )
    if getattr(model.text, "index_topk", None):
        return f"{model.name} picks keys by an index (index_topk), which needs a cache of its own"
    return None


def _signature(model: Anatomy, kind: type[PreTrainedModel]) -> str | None:
    known = inspect.signature(kind.forward).parameters
    types = model.layer_types or ("full_attention",)
    needed = ["position_ids", "logits_to_keep"]
    if all(t in NO_ATTENTION for t in types) or model.name in alibi.MODELS:
        needed.remove("position_ids")
    missing = ["cache"] if find_cache_keyword(kind) is None else []
    if missing := [*missing, *(n for n in needed if n not in known)]:
        return f"{kind.__name__}.forward takes no {', '.join(missing)}, without which it cannot be driven from outside"
    return None


def _kernel(model: Anatomy, kind: type[PreTrainedModel]) -> str | None:
    kernel = model.attention
    capped = getattr(model.text, "attn_logit_softcapping", None) is not None
    without = model.text is model.config and not kind._supports_sdpa
    eager_only = model.text_name in _EAGER_ONLY or capped or without
    others = "'eager'" if eager_only else "'sdpa' or 'eager'"
    if kernel not in (None, "sdpa", "eager", "flex_attention"):
        return (
            f"attention implementation '{kernel}' takes no 4-D mask; load the model with attn_implementation={others}"
        )
    if model.flex and (reason := _flexless(model, kind)) is not None:
        return (
            f"attention implementation 'flex_attention' cannot be used with {model.name}, which {reason}; "
            f"load the model with attn_implementation={others}"
        )
    if kernel == "sdpa" and eager_only:
        return (
            f"attention implementation 'sdpa' computes {model.name} wrongly (no soft-cap, no sinks); "
            "load the model with attn_implementation='eager'"
        )
    return None


def _flexless(model: Anatomy, kind: type[PreTrainedModel]) -> str | None:
    if not kind._supports_flex_attn:
        return "transformers does not run so"
    if model.text_name in _SINKS:
        return "has attention sinks (transformers adds them on GPUs only, where that has not been tried)"
    if model.recurrent:
        return "hands the mask to recurrent layers too, and they cannot read one of its kind"
    return None


def _processes(model: Anatomy, kind: type[PreTrainedModel]) -> str | None:
    if model.num_processes == 1:
        return None
    if model.recurrent:
        return (
            f"{model.name} has recurrent layers, whose states in {model.num_processes} processes are not known here; "
            "load it in one process, without tp_plan"
        )
    if model.num_processes != dist.get_world_size():
        return (
            f"the model is spread over {model.num_processes} of {dist.get_world_size()} processes; start as many as "
            "hold it"
        )
    return None


def _outliers(model: Anatomy, kind: type[PreTrainedModel]) -> str | None:
    quantization = getattr(model.config, "quantization_config", None) or {}
    settings = quantization if isinstance(quantization, Mapping) else quantization.to_dict()
    if settings.get("load_in_8bit") and settings.get("llm_int8_threshold", 6.0) > 0:
        return (
            "bitsandbytes' 8-bit layers look for outliers in all tokens of a forward, so draft tokens would change the "
            "logits of tokens before them; load the model with llm_int8_threshold=0, or in 4 bits"
        )
    return None


def _rounded(model: Anatomy, kind: type[PreTrainedModel]) -> str | None:
    weights = () if model.layers is None else model.layers.parameters()
    if any(getattr(weight, "act_quant_kwargs", None) is not None for weight in weights):
        return (
            "torchao quantises this model's activations anew in every forward, so a block of draft tokens has other "
            "logits than single tokens; quantise the weights alone, as Int8WeightOnlyConfig does"
        )
    return None


def _dynamic(model: Anatomy, kind: type[PreTrainedModel]) -> str | None:
    if any(rotary_type(p) == "dynamic" for p in rotary_parameters(model.text)):
        return f"{model.name} uses dynamic rotary scaling, which embeds cached tokens anew as text grows"
    return None


REFUSALS: Mapping[str, Callable[[Anatomy, type[PreTrainedModel]], str | None]] = {
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
    "8-bit layers that look at several tokens": _outliers,
    "activations that are quantised in every forward": _rounded,
    "recurrent layers that are spread over processes": _processes,
}
"""What is refused, and the check that says why; in this order. Contexts beyond `context_limit` are refused too."""


def _too_long(model: Anatomy, max_context: int | None) -> str | None:
    for limit in model.limits:
        if max_context is not None and max_context > limit.tokens:
            return (
                f"{model.name} {limit.reason} once text is longer than {limit.tokens} tokens, and max_context is "
                f"{max_context}; give max_context={limit.tokens} or less"
            )
    return None
