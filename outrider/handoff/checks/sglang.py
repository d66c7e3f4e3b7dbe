"""Decodes prompts with a server of SGLang."""

import json
import sys
import urllib.request
from collections.abc import Mapping
from typing import Any


def decode(expected: Mapping[str, Any], target: str, url: str | None) -> Mapping[str, Any]:
    """The tokens of each prompt, and in how many steps SGLang said them."""
    if url is None:
        sys.exit("start SGLang with launch.sh, then give --url http://127.0.0.1:30000")
    tokens: list[list[int]] = []
    steps = 0
    for prompt, ours in zip(expected["prompts"], expected["tokens"], strict=True):
        law = {"temperature": 0, "max_new_tokens": len(ours), "ignore_eos": True}
        body = json.dumps({"input_ids": prompt, "sampling_params": law}).encode()
        request = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            reply = json.loads(answer.read())
        tokens.append(reply["output_ids"][-len(ours) :])
        steps += reply["meta_info"].get("spec_verify_ct") or 0
    return {"tokens": tokens, "steps": steps or None}
