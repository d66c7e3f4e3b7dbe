"""Chunks of chat completions, as the server streams them."""

from typing import Any


def chunk(
    delta: dict[str, Any] | None,
    *,
    finish_reason: str | None = None,
    stop_reason: str | int | None = None,
    logprobs: dict[str, Any] | None = None,
    usage: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A chunk with one choice; without a delta it has none."""
    choice = {
        "index": 0,
        "delta": delta,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [] if delta is None else [choice],
        "usage": usage,
    }


def call(index: int, id: str | None = None, name: str | None = None, arguments: str = "") -> dict[str, Any]:
    """A piece of a tool call; the first one has an id and a name."""
    function: dict[str, Any] = {"arguments": arguments}
    return (
        {"index": index, "function": function}
        if id is None
        else {
            "index": index,
            "id": id,
            "type": "function",
            "function": function | {"name": name},
        }
    )


def usage(prompt: int, completion: int, *, cached: int = 0, reasoning: int = 0) -> dict[str, Any]:
    """Token counts."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
