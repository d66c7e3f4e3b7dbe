"""Decodes prompts with transformers: with an assistant model, or with the code in `custom_generate`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def decode(expected: Mapping[str, Any], target: str, url: str | None) -> Mapping[str, Any]:
    """The tokens of each prompt, and in how many forwards of the target they were said."""
    import torch
    from transformers import AutoModelForCausalLM

    here, dtype = str(Path(__file__).resolve().parent), getattr(torch, expected["dtype"])
    model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype)
    options: dict[str, Any] = {"custom_generate": here, "trust_remote_code": True}
    if expected["method"] == "assistant_model":
        options = {"assistant_model": AutoModelForCausalLM.from_pretrained(here, dtype=dtype)}
    elif expected["engine_options"]:
        options["drafter"] = expected["engine_options"]["drafter"].replace("$HERE", here)
    model.generation_config.eos_token_id = None
    forwards, tokens = 0, list[list[int]]()

    def count(*given: Any) -> None:
        nonlocal forwards
        forwards += 1

    model.get_input_embeddings().register_forward_hook(count)
    for prompt in expected["prompts"]:
        ids = torch.tensor([prompt])
        made = model.generate(ids, max_new_tokens=expected["new_tokens"], do_sample=False, **options)
        tokens.append(made[0, len(prompt) :].tolist())
    counted = forwards if expected["method"] == "assistant_model" else None
    return {"tokens": tokens, "steps": counted}
