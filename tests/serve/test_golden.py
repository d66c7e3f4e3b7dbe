"""Streams as clients get them, byte for byte, but for names, times and counts of steps.

`python -m tests.serve.test_golden` writes the files anew, after a change of the streams that is wanted.
"""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.served import NAME, loaded, serving

FOLDER = Path(__file__).parent / "golden"
WEATHER = {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"]}
TALK = [{"role": "user", "content": "Tell me about a dog."}]
COMMON = {"model": NAME, "temperature": 0, "stream": True, "speculation": {"enabled": False}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": WEATHER}}
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    # As GuideLLM asks.
    "completions": (
        "/v1/completions",
        {
            "prompt": "Once upon a time",
            "max_tokens": 4,
            "stop": None,
            "ignore_eos": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    # As lm-evaluation-harness asks, but as a stream.
    "scored": (
        "/v1/completions",
        {"prompt": [[9, 10, 11]], "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234},
    ),
    # As `vllm bench serve` asks.
    "chat": (
        "/v1/chat/completions",
        {"messages": TALK, "max_completion_tokens": 4, "stream_options": {"include_usage": True}},
    ),
    # As agents ask.
    "call": (
        "/v1/chat/completions",
        {"messages": TALK, "max_tokens": 48, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    ),
    "responses": ("/v1/responses", {"input": "Tell me about a dog.", "max_output_tokens": 4}),
    # As a coding agent asks.
    "messages": (
        "/v1/messages?beta=true",
        {"messages": TALK, "max_tokens": 4, "system": [{"type": "text", "text": "Short.", "cache_control": {}}]},
    ),
}
MASKS = (
    (r'"(id|item_id|call_id|system_fingerprint)":"[^"]*"', r'"\1":"ID"'),
    (r'"(created|created_at)":\d+', r'"\1":0'),
    (r'"metrics":\{"time_to.*?"target_seconds":[^}]*\}\}', '"metrics":{}'),
    (r'"(logprob|token_logprobs)":-?[\d.e-]+', r'"\1":0'),
    (r"-\d+\.\d+(e-\d+)?", "-0.0"),
    (r'"(cached_tokens|cache_read_input_tokens|input_tokens|output_tokens)":\d+', r'"\1":0'),
)


def masked(text: str) -> str:
    """A stream without what differs from run to run."""
    for pattern, mask in MASKS:
        text = re.sub(pattern, mask, text)
    return text


def streamed(client: httpx.Client, name: str) -> str:
    path, body = STREAMS[name]
    answer = client.post(path, json={**COMMON, **body})
    assert answer.status_code == 200, answer.text
    return masked(answer.text)


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_is_the_recorded_one(client: httpx.Client, name: str) -> None:
    assert streamed(client, name) == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def test_every_event_is_one_line_of_json(client: httpx.Client) -> None:
    for name in STREAMS:
        for event in (FOLDER / f"{name}.txt").read_text(encoding="utf-8").removesuffix("\n\n").split("\n\n"):
            *head, data = event.split("\n")
            assert not head or head[0].startswith("event: ")
            assert data == "data: [DONE]" or json.loads(data.removeprefix("data: "))


def record() -> None:
    """Write the files."""
    FOLDER.mkdir(exist_ok=True)
    with serving(loaded()) as url, httpx.Client(base_url=url, timeout=60) as client:
        for name in STREAMS:
            (FOLDER / f"{name}.txt").write_text(streamed(client, name), encoding="utf-8")


if __name__ == "__main__":
    record()
