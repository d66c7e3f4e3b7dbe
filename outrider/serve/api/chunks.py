"""What a chunk of a streamed chat completion says, for routes that answer in another format."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

Chunk = Mapping[str, Any]
"""An object `chat.completion.chunk`."""
Chunks = AsyncIterator[Chunk]


@dataclass(frozen=True, kw_only=True)
class CallPiece:
    """A piece of a tool call.

    Attributes:
        index: Number of the call in the answer.
        id: In the first piece of a call.
        name: In the first piece of a call.
        arguments: The next characters of the arguments, which are JSON.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True, kw_only=True)
class ChatPiece:
    """What one chunk brings.

    Attributes:
        reasoning: New text of the model's reasoning.
        text: New text of the answer.
        calls: New pieces of tool calls.
        logprobs: Of the chunk's tokens, in the format of chat completions.
        finish_reason: In the chunk that ends the answer.
        stop_reason: The stop string or token that ended it.
        usage: Token counts, if the chunk has them.
        metrics: Timings and speculation, if the chunk has them.
    """

    reasoning: str = ""
    text: str = ""
    calls: tuple[CallPiece, ...] = ()
    logprobs: tuple[Mapping[str, Any], ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    usage: Mapping[str, Any] | None = None
    metrics: Mapping[str, Any] | None = None


def read(chunk: Chunk) -> ChatPiece:
    """What a chunk brings; it has one choice or none.

    Example:
        >>> read({"choices": [{"index": 0, "delta": {"content": "Hi"}, "finish_reason": None}]}).text
        'Hi'
    """
    usage, metrics = chunk.get("usage"), chunk.get("metrics")
    if not chunk["choices"]:
        return ChatPiece(usage=usage, metrics=metrics)
    choice = chunk["choices"][0]
    delta = choice["delta"]
    return ChatPiece(
        reasoning=delta.get("reasoning") or "",
        text=delta.get("content") or "",
        calls=tuple(_call(each) for each in delta.get("tool_calls") or ()),
        logprobs=tuple((choice.get("logprobs") or {}).get("content") or ()),
        finish_reason=choice.get("finish_reason"),
        stop_reason=choice.get("stop_reason"),
        usage=usage,
        metrics=metrics,
    )


def _call(piece: Mapping[str, Any]) -> CallPiece:
    function = piece.get("function") or {}
    return CallPiece(
        index=piece["index"], id=piece.get("id"), name=function.get("name"), arguments=function.get("arguments") or ""
    )
