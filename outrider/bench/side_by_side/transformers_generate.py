"""transformers' own `generate` on prompts of token ids: timed, and its calls of the model counted."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from outrider.core.types import Sampling


@dataclass(frozen=True, kw_only=True)
class TransformersOutput:
    """What `model.generate` made of some prompts.

    Attributes:
        tokens: Output of each prompt, up to its end token.
        seconds: Of the whole call, prompts included.
        forwards: Calls of the model.
    """

    tokens: Sequence[Sequence[int]]
    seconds: float
    forwards: int


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    eos_ids: frozenset[int] = frozenset(),
    assistant: PreTrainedModel | None = None,
    num_assistant_tokens: int = 0,
    prompt_lookup_num_tokens: int | None = None,
) -> TransformersOutput:
    """Answer prompts by `model.generate`, as one padded batch.

    Args:
        prompts: Token ids.
        max_new_tokens: Most tokens of each output.
        eos_ids: Token ids that end an output; none lets all outputs be as long.
        assistant: A draft model for transformers' own assisted generation, which drafts `num_assistant_tokens` tokens.
        prompt_lookup_num_tokens: Tokens that transformers' own prompt lookup drafts.
    """
    longest = max(map(len, prompts))
    pad = model.generation_config.pad_token_id or 0
    missing = [longest - len(prompt) for prompt in prompts]
    padded = [[pad] * n + list(prompt) for n, prompt in zip(missing, prompts, strict=True)]
    ids = torch.tensor(padded, device=model.device)
    mask = torch.tensor([[0] * n + [1] * (longest - n) for n in missing], device=model.device)
    options = {**sampling_options(sampling), "max_new_tokens": max_new_tokens, "pad_token_id": pad}
    if assistant is not None:
        settings = assistant.generation_config
        settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = num_assistant_tokens, "constant"
        settings.assistant_confidence_threshold = 0
        options["assistant_model"] = assistant
    if prompt_lookup_num_tokens is not None:
        options["prompt_lookup_num_tokens"] = prompt_lookup_num_tokens
    torch.manual_seed(seed)
    forwards = 0

    def count(*_: object) -> None:
        nonlocal forwards
        forwards += 1

    usual, model.generation_config.eos_token_id = model.generation_config.eos_token_id, sorted(eos_ids) or None
    hook = model.register_forward_pre_hook(count)
    try:
        began = time.perf_counter()
        texts = model.generate(ids, attention_mask=mask, **options)
        seconds = time.perf_counter() - began
    finally:
        hook.remove()
        model.generation_config.eos_token_id = usual
    tokens = [_ended(each, eos_ids) for each in texts[:, longest:].tolist()]
    return TransformersOutput(tokens=tokens, seconds=seconds, forwards=forwards)


def sampling_options(sampling: Sampling) -> dict[str, Any]:
    """What `model.generate` must be told to draw as an engine does."""
    if sampling.temperature == 0:
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
    }


def _ended(tokens: list[int], eos_ids: frozenset[int]) -> list[int]:
    """An output up to its ending token, which a padded batch pads behind."""
    ends = [i for i, token in enumerate(tokens) if token in eos_ids]
    return tokens[: ends[0] + 1] if ends else tokens
