"""What `generate` can do and drafting cannot, refused by name."""

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import Cache, GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMode

from outrider.types import InputError, Processor, Sampling

_OTHER_MODES = {
    "assisted_generation": "assistant_model, prompt_lookup_num_tokens, assistant_early_exit or use_mtp",
    "beam_sample": "num_beams",
    "beam_search": "num_beams",
    "constrained_beam_search": "constraints or force_words_ids",
    "contrastive_search": "penalty_alpha",
    "dola_generation": "dola_layers",
    "group_beam_search": "num_beam_groups",
}
"""Ways of generating that are neither sampling nor greedy, and the arguments that ask for them."""

_CACHES = ("past_key_values", "cache_params")
_PREPARED = frozenset({"attention_mask", "position_ids", "use_cache", "logits_to_keep", *_CACHES})
"""What `generate` prepares for every text model; anything else belongs to a kind of input that is not supported."""


def check(model: PreTrainedModel, config: GenerationConfig, model_kwargs: Mapping[str, Any]) -> None:
    """Raise InputError for what `generate` can do and drafting cannot."""
    if model.config.is_encoder_decoder:
        raise InputError(f"{model.config.model_type} is an encoder-decoder model; a decoder-only one is needed")
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH):
        raise InputError(
            f"{mode.value} is neither sampling nor greedy decoding; drop {_OTHER_MODES[mode.value]}, or custom_generate"
        )
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name):
            raise InputError(f"{name} cannot be had from a draft's forwards; drop it, or custom_generate")
    if config.cache_implementation not in (None, "dynamic"):
        raise InputError(
            f"cache_implementation={config.cache_implementation!r} has no effect on the engine's own cache; drop it"
        )
    for name in _CACHES:
        cache = model_kwargs.get(name)
        if cache is not None and (getattr(cache, "_is_user_defined", False) or _filled(cache)):
            raise InputError(f"{name} cannot be continued, the engine has a cache of its own; give the whole text")
    if foreign := sorted(name for name, value in model_kwargs.items() if name not in _PREPARED and value is not None):
        raise InputError(f"{', '.join(foreign)} cannot be used; give input_ids and attention_mask only")
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    if positions is not None:
        seen = torch.ones_like(positions) if mask is None else mask
        if not bool((positions == seen.cumsum(-1) - 1)[seen != 0].all()):
            raise InputError("position_ids must count each row's tokens from 0; drop them")


def _filled(cache: Cache) -> bool:
    """Whether a cache holds tokens. One of recurrent layers alone cannot say how many."""
    try:
        return cache.get_seq_length() > 0
    except ValueError:
        return bool(cache.has_previous_state())


def check_processors(processors: Sequence[Processor], input_ids: Int[Tensor, "rows length"], vocab_size: int) -> None:
    """Raise InputError where a processor depends on more than a row's tokens.

    A processor that is not transformers' own is asked the same thing twice.
    """
    Sampling(processors=tuple(processors))
    for processor in processors:
        if is_transformers_own(processor):
            continue
        answers, states = [], []
        for _ in range(2):
            flat = torch.zeros(len(input_ids), vocab_size, device=input_ids.device)
            try:
                answers.append(processor(input_ids, flat))
            except Exception:
                if not answers:
                    raise
                answers.append(torch.empty(0))
            states.append(_state(processor))
        if not torch.equal(*answers) or states[0] != states[1]:
            raise InputError(
                f"{type(processor).__name__} is changed by being asked, and cannot follow a draft's branches; "
                "use logits processors that depend on the tokens alone"
            )


def _state(processor: Processor) -> bytes | None:
    """What a processor knows, to compare; None where that cannot be told."""
    try:
        return pickle.dumps(vars(processor))
    except Exception:
        return None


def is_transformers_own(processor: Processor) -> bool:
    return type(processor).__module__ == "transformers.generation.logits_process"


def padding_of(input_ids: Int[Tensor, "rows length"], mask: Int[Tensor, "rows length"] | None) -> list[int]:
    """How many tokens of padding each row begins with."""
    if mask is None:
        return [0] * len(input_ids)
    padding = (mask == 0).sum(1)
    if not torch.equal(mask != 0, torch.arange(mask.shape[1], device=mask.device) >= padding[:, None]):
        raise InputError(
            "attention_mask hides tokens inside or behind a prompt; pad on the left (tokenizer.padding_side = 'left')"
        )
    if bool((padding == mask.shape[1]).any()):
        raise InputError("a row of the batch is all padding; give every row at least one token")
    return padding.tolist()
