"""Decodes prompts with vLLM, in this process or by a server."""

import json
import os
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DRAFTS = "vllm:spec_decode_num_drafts"


def decode(expected: Mapping[str, Any], target: str, url: str | None) -> Mapping[str, Any]:
    """The tokens of each prompt, and in how many steps vLLM said them."""
    return _from_server(expected, url) if url else _started(expected, target)


def _started(expected: Mapping[str, Any], target: str) -> Mapping[str, Any]:
    # The second counts on CPUs alone.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    here = str(Path(__file__).resolve().parent)
    config: dict[str, Any] = dict(expected["engine_options"])
    if "model" in config:
        config["model"] = here
    longest = max(map(len, expected["prompts"])) + expected["new_tokens"] + 2 * (config["num_speculative_tokens"] + 1)
    llm = LLM(
        target,
        dtype=expected["dtype"],
        max_model_len=longest,
        max_num_seqs=len(expected["prompts"]),
        speculative_config=config,
        enable_prefix_caching=False,
        disable_log_stats=False,
        enforce_eager=True,
    )
    laws = [
        SamplingParams(temperature=0.0, max_tokens=len(ours), ignore_eos=True, detokenize=False)
        for ours in expected["tokens"]
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in expected["prompts"]], laws, use_tqdm=False)
    drafts = sum(each.value for each in llm.get_metrics() if each.name == DRAFTS)
    return {"tokens": [list(each.outputs[0].token_ids) for each in outputs], "steps": int(drafts)}


def _from_server(expected: Mapping[str, Any], url: str) -> Mapping[str, Any]:
    model = json.loads(_read(f"{url}/v1/models"))["data"][0]["id"]
    before, tokens = _drafts(url), list[list[int]]()
    for prompt, ours in zip(expected["prompts"], expected["tokens"], strict=True):
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": len(ours),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        tokens.append(json.loads(_read(request))["choices"][0]["token_ids"])
    return {"tokens": tokens, "steps": int(_drafts(url) - before)}


def _drafts(url: str) -> float:
    lines = _read(f"{url}/metrics").decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{DRAFTS}_total"))


def _read(request: Any) -> bytes:
    with urllib.request.urlopen(request) as answer:
        read: bytes = answer.read()
    return read
