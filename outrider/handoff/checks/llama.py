"""Decodes prompts with a server of llama.cpp."""

import json
import sys
import urllib.request
from collections.abc import Mapping
from typing import Any


def decode(expected: Mapping[str, Any], target: str, url: str | None) -> Mapping[str, Any]:
    """The tokens of each prompt, and in how many steps llama.cpp said them."""
    if url is None:
        sys.exit("start llama-server with launch.sh, then give --url http://127.0.0.1:8080")
    tokens: list[list[int]] = []
    steps = 0
    for prompt, ours in zip(expected["prompts"], expected["tokens"], strict=True):
        body = {
            "prompt": prompt,
            # Without `ignore_eos`, which would forbid an end token as the last one.
            "n_predict": len(ours),
            "temperature": 0,
            "return_tokens": True,
            "cache_prompt": False,
        }
        request = urllib.request.Request(
            f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            reply = json.loads(answer.read())
        tokens.append(reply["tokens"])
        accepted = reply["timings"].get("draft_n_accepted")
        # The prompt's forward says the first token. Every later step says one token beside the accepted ones.
        steps += 0 if accepted is None else len(reply["tokens"]) - 1 - accepted
    return {"tokens": tokens, "steps": steps or None}
