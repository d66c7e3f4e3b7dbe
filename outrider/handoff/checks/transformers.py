"""Decodes with transformers: with an assistant model, or with the code in `custom_generate`.

`python engine.py --target TARGET --prompt TEXT` answers a prompt.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def place(target: str) -> dict[str, str]:
    """Where a model is, as `from_pretrained` takes it."""
    if target.endswith(".gguf") and Path(target).is_file():
        return {"pretrained_model_name_or_path": str(Path(target).parent), "gguf_file": Path(target).name}
    return {"pretrained_model_name_or_path": target}


def loaded(expected: Mapping[str, Any], target: str) -> tuple[Any, dict[str, Any]]:
    """The target, and the arguments of its `generate` that make it draft."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, expected["dtype"])
    model = AutoModelForCausalLM.from_pretrained(**place(target), dtype=dtype)
    if expected["method"] == "assistant_model":
        return model, {"assistant_model": AutoModelForCausalLM.from_pretrained(HERE, dtype=dtype)}
    options: dict[str, Any] = {"custom_generate": str(HERE), "trust_remote_code": True}
    if expected["engine_options"]:
        options["drafter"] = expected["engine_options"]["drafter"].replace("$HERE", str(HERE))
    return model, options


def decode(expected: Mapping[str, Any], target: str, url: str | None) -> Mapping[str, Any]:
    """The tokens of each prompt, and in how many forwards of the target they were said."""
    import torch

    model, options = loaded(expected, target)
    model.generation_config.eos_token_id = None
    forwards, tokens = 0, list[list[int]]()

    def count(*args: Any) -> None:
        nonlocal forwards
        forwards += 1

    model.get_input_embeddings().register_forward_hook(count)
    for prompt, ours in zip(expected["prompts"], expected["tokens"], strict=True):
        ids = torch.tensor([prompt])
        # A prompt may hold the pad token, and without a mask generate takes that for padding.
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=len(ours),
            do_sample=False,
            **options,
        )
        tokens.append(output[0, len(prompt) :].tolist())
    counted = forwards if expected["method"] == "assistant_model" else None
    return {"tokens": tokens, "steps": counted}


def answer(target: str, prompt: str, new_tokens: int) -> str:
    """What the target says to a prompt, as a chat where it has a template."""
    from transformers import AutoTokenizer

    expected = json.loads((HERE / "expected.json").read_text(encoding="utf-8"))
    model, options = loaded(expected, target)
    tokenizer = AutoTokenizer.from_pretrained(**place(target))
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=new_tokens, **options)
    text: str = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Answer a prompt with transformers and the drafter in this folder.")
    parser.add_argument("--target", required=True, help="The target's hub id or folder.")
    parser.add_argument("--prompt", default="Hello")
    parser.add_argument("--new-tokens", type=int, default=128)
    options = parser.parse_args()
    print(answer(options.target, options.prompt, options.new_tokens))
