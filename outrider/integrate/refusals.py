"""Refuse what `generate` can do and drafting cannot, by name."""

import inspect
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache, GenerationConfig, PrefixConstrainedLogitsProcessor, PreTrainedModel
from transformers.generation import GenerationMixin, GenerationMode

from outrider.core.processors import Processor
from outrider.core.types import InputError, Sampling
from outrider.lm.hf.cache_keyword import CACHE_KEYWORDS

_OTHER_MODES = {
    "assisted_generation": "assistant_model, prompt_lookup_num_tokens, assistant_early_exit or use_mtp",
    "beam_sample": "num_beams",
    "beam_search": "num_beams",
    "constrained_beam_search": "constraints or force_words_ids",
    "contrastive_search": "penalty_alpha",
    "dola_generation": "dola_layers",
    "group_beam_search": "num_beam_groups",
}
"""Decoding methods other than sampling and greedy, with the arguments that select them."""

_OTHER_OUTPUTS = {"quantized": "rounds keys and values", "paged": "runs another generate"}
"""Kinds of cache whose output is not that of plain decoding."""
_EXTRAS = ("output_attentions", "output_hidden_states")
_PREPARED = frozenset({*_EXTRAS, "attention_mask", "position_ids", "use_cache", "logits_to_keep", *CACHE_KEYWORDS})
"""The inputs that `generate` prepares for every text model. Other inputs are not supported."""

_KEPT_BACK = {
    "streamer": "give it to as_custom_generate(streamer=...)",
    "assistant_model": "give a draft model as drafter='model:path=...'",
    "synced_gpus": "drop it, drafts differ in length",
}
"""Arguments that `generate` does not pass to a callable, and what to do instead."""


def check_call() -> None:
    """Raise InputError if the calling `generate` got an argument that it does not pass on.

    Such arguments are read from its local variables. Without this check, the reader of a streamer would wait for ever.
    """
    frame, generate = inspect.currentframe(), inspect.unwrap(GenerationMixin.generate).__code__
    while frame is not None and frame.f_code is not generate:
        frame = frame.f_back
    arguments: Mapping[str, Any] = {} if frame is None else frame.f_locals
    for name, advice in _KEPT_BACK.items():
        if arguments.get(name) not in (None, False):
            raise InputError(f"generate does not hand {name} on to custom_generate; {advice}")


def check(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "rows length"],
    config: GenerationConfig,
    model_kwargs: Mapping[str, Any],
) -> None:
    """Raise InputError for what `generate` can do and drafting cannot."""
    if model.config.is_encoder_decoder:
        raise InputError(f"{model.config.model_type} is an encoder-decoder model; a decoder-only one is needed")
    prepare = getattr(model.prepare_inputs_for_generation, "__func__", None)
    if prepare is not type(model).prepare_inputs_for_generation:
        raise InputError(
            "the model's prepare_inputs_for_generation was replaced (prompt tuning does so), and drafting does not "
            "call it; generate without Outrider"
        )
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH):
        raise InputError(
            f"{mode.value} is neither sampling nor greedy decoding; drop {_OTHER_MODES[mode.value]}, or Outrider"
        )
    for name in _EXTRAS:
        if getattr(config, name) and config.return_dict_in_generate:
            raise InputError(f"{name} cannot be had from a draft's forwards; drop it, or Outrider")
    check_cache(config.cache_implementation)
    for name in CACHE_KEYWORDS:
        cache = model_kwargs.get(name)
        if cache is not None and (getattr(cache, "_is_user_defined", False) or _filled(cache)):
            raise InputError(f"{name} cannot be continued, the engine has a cache of its own; give the whole text")
    if foreign := sorted(name for name, value in model_kwargs.items() if name not in _PREPARED and value is not None):
        raise InputError(f"{', '.join(foreign)} cannot be used; give input_ids and attention_mask only")
    if input_ids.numel() == 0:
        raise InputError(f"input_ids of shape {tuple(input_ids.shape)} hold no token; give every row at least one")
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    if positions is not None:
        seen = torch.ones_like(input_ids) if mask is None else mask
        if positions.shape != seen.shape or not bool((positions == seen.cumsum(-1) - 1)[seen != 0].all()):
            raise InputError("position_ids must count each row's tokens from 0; drop them")


def _filled(cache: Cache) -> bool:
    """Whether a cache holds tokens. A cache of recurrent layers alone has no length."""
    try:
        return cache.get_seq_length() > 0
    except ValueError:
        return bool(cache.has_previous_state())


def check_cache(implementation: str | None) -> None:
    """Raise InputError for a kind of cache that would change the output; of the others, the engine's takes the place.

    Checkpoints name kinds such as `static` and `sliding_window`, which keep the same keys and values in other tensors.
    """
    if implementation in _OTHER_OUTPUTS:
        raise InputError(
            f"cache_implementation={implementation!r} {_OTHER_OUTPUTS[implementation]}, and the engine has a cache of "
            "its own; drop it (set model.generation_config.cache_implementation to None if the checkpoint names it)"
        )


def check_padding(pads: bool, config: GenerationConfig) -> None:
    """Raise InputError if ended rows need padding and there is no padding token."""
    if pads and config._pad_token_tensor is None:
        raise InputError("rows may end at different lengths and there is no padding token; give pad_token_id")


def check_processors(processors: Sequence[Processor], input_ids: Int[Tensor, "rows length"], vocab_size: int) -> None:
    """Raise InputError if a processor's scores for a row depend on more than the row's tokens and scores.

    The caller's own processors are called on the prompts three times, the third time after a longer text, and then row
    by row. A processor that depends on nothing else returns the same scores each time and does not change.
    """
    Sampling(processors=tuple(processors))
    noise = torch.randn(len(input_ids), vocab_size, generator=torch.Generator().manual_seed(0)).to(input_ids.device)
    for processor in processors:
        if is_transformers_own(processor) and not isinstance(processor, PrefixConstrainedLogitsProcessor):
            continue
        first, state = processor(input_ids, noise.clone()), _state(processor)
        again, changed = _scores_of(processor, input_ids, noise), _state(processor) != state
        _scores_of(processor, torch.cat([input_ids, input_ids[:, -1:]], 1), noise)
        later = _scores_of(processor, input_ids, noise)
        if changed or not (_equal(first, again) and _equal(first, later)):
            raise InputError(
                f"{type(processor).__name__} is changed by being asked, and cannot follow a draft's branches; "
                "use logits processors that depend on the tokens alone"
            )
        for row in range(len(input_ids) if len(input_ids) > 1 else 0):
            copies = torch.full((len(input_ids),), row, device=input_ids.device)
            alone = _scores_of(processor, input_ids[copies], noise[copies])
            if not _equal(first[row], None if alone is None else alone[row]):
                raise InputError(
                    f"{type(processor).__name__} gives a row other scores beside other rows, and drafted rows are "
                    "scored one by one; use logits processors that look at each row by itself"
                )


def _scores_of(
    processor: Processor, ids: Int[Tensor, "rows length"], scores: Float[Tensor, "rows vocab"]
) -> Float[Tensor, "rows vocab"] | None:
    """The scores that a processor returns; None if it fails."""
    try:
        return processor(ids, scores.clone())
    except Exception:
        return None


def _equal(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and torch.allclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)


def _state(processor: Processor) -> bytes | None:
    """A processor's attributes, for comparison; None where that cannot be told."""
    try:
        return pickle.dumps(vars(processor))
    except Exception:
        return None


def is_transformers_own(processor: Processor) -> bool:
    return type(processor).__module__ == "transformers.generation.logits_process"


def padding_of(input_ids: Int[Tensor, "rows length"], mask: Tensor | None) -> list[int]:
    """How many tokens of padding each row begins with."""
    if mask is None:
        return [0] * len(input_ids)
    if mask.shape != input_ids.shape:
        raise InputError(
            f"attention_mask has shape {tuple(mask.shape)}, input_ids {tuple(input_ids.shape)}; give one mark per token"
        )
    padding = (mask == 0).sum(1)
    if not torch.equal(mask != 0, torch.arange(mask.shape[1], device=mask.device) >= padding[:, None]):
        raise InputError(
            "attention_mask hides tokens inside or behind a prompt; pad on the left (tokenizer.padding_side = 'left')"
        )
    if bool((padding == mask.shape[1]).any()):
        raise InputError("a row of the batch is all padding; give every row at least one token")
    return padding.tolist()
