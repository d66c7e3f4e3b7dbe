"""transformers behind the driver's lines: `plain`, `prompt lookup` and `draft model` (assisted decoding)."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from recipes.engines.talk import Asked, Decode, Options, drive


def load(options: Options) -> Decode:
    """Load the models, with end tokens that do not end."""
    torch.set_num_threads(options.threads)
    target, draft = (
        AutoModelForCausalLM.from_pretrained(place, dtype=getattr(torch, options.dtype)).eval()
        for place in (options.target, options.draft)
    )
    pad = target.generation_config.pad_token_id or 0
    for model in (target, draft):
        model.generation_config.eos_token_id = None
    more: dict[str, Any] = {}
    if options.mode == "prompt lookup":
        more["prompt_lookup_num_tokens"] = options.draft_tokens
        more["max_matching_ngram_size"] = options.ngram
    if options.mode == "draft model":
        more["assistant_model"] = draft
        draft.generation_config.num_assistant_tokens = options.draft_tokens
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0

    @torch.inference_mode()
    def decode(asked: Asked) -> list[list[int]]:
        longest = max(map(len, asked.prompts))
        missing = [longest - len(prompt) for prompt in asked.prompts]
        padded = [[pad] * n + prompt for n, prompt in zip(missing, asked.prompts, strict=True)]
        law: dict[str, Any] = {"do_sample": False}
        if asked.temperature > 0:
            law = {"do_sample": True, "temperature": asked.temperature, "top_k": 0, "top_p": 1.0}
        torch.manual_seed(asked.seed)
        made = target.generate(
            torch.tensor(padded),
            attention_mask=torch.tensor([[0] * n + [1] * (longest - n) for n in missing]),
            max_new_tokens=asked.new_tokens,
            pad_token_id=pad,
            **law,
            **more,
        )
        tokens: list[list[int]] = made[:, longest:].tolist()
        return tokens

    return decode


if __name__ == "__main__":
    drive(load)
