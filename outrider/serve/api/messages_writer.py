"""The answer of /v1/messages: the chunks of a chat completion become content blocks and their events."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.serve.api.chunks import CallPiece, Chunk, read

ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    529: "overloaded_error",
}
"""The type of an error by its status; of all others `api_error`."""
OVERLOADED = 529
"""Anthropic's status of a full queue."""

Event = dict[str, Any]


def error_body(status: int, message: str, request_id: str) -> dict[str, Any]:
    """The body of an error."""
    kind = ERRORS.get(status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


@dataclass(kw_only=True)
class MessageAnswer:
    """A message that grows with each chunk; changes in place.

    Attributes:
        content: Its blocks so far.
    """

    id: str
    model: str
    content: list[dict[str, Any]] = field(default_factory=list)
    _usage: Mapping[str, Any] = field(default_factory=dict)
    _metrics: Mapping[str, Any] | None = None
    _finish: str | None = None
    _stopped: str | int | None = None
    _call: int = -1
    _arguments: str = ""
    _closed: bool = True

    def start(self, chunk: Chunk) -> Event:
        """The first event; the chunk says how long the prompt is."""
        self._usage = read(chunk).usage or {}
        usage = self._counted() | {"output_tokens": 0}
        return {"type": "message_start", "message": self._message(usage) | {"content": []}}

    def add(self, chunk: Chunk) -> Iterator[Event]:
        """The events of a chunk."""
        piece = read(chunk)
        self._usage = piece.usage or self._usage
        self._metrics = piece.metrics or self._metrics
        if piece.reasoning:
            yield from self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self.content[-1]["thinking"] += piece.reasoning
            yield self._delta({"type": "thinking_delta", "thinking": piece.reasoning})
        if piece.text:
            yield from self._open("text", {"type": "text", "text": ""})
            self.content[-1]["text"] += piece.text
            yield self._delta({"type": "text_delta", "text": piece.text})
        for call in piece.calls:
            yield from self._called(call)
        if piece.finish_reason is not None:
            self._finish, self._stopped = piece.finish_reason, piece.stop_reason

    def end(self) -> Iterator[Event]:
        """The last events."""
        yield from self._close()
        message = self.message()
        ends = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": ends, "usage": message["usage"], **self._beside()}
        yield {"type": "message_stop"}

    def message(self) -> dict[str, Any]:
        """The whole message, once it has ended."""
        return self._message(self._counted()) | self._beside()

    def _message(self, usage: dict[str, Any]) -> dict[str, Any]:
        reason = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn", None: None}[self._finish]
        sequence = self._stopped if isinstance(self._stopped, str) and reason == "end_turn" else None
        if reason == "end_turn":
            if any(block["type"] == "tool_use" for block in self.content):
                # A tool that the request names is called without a reason of its own.
                reason = "tool_use"
            elif sequence is not None:
                reason = "stop_sequence"
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": self.content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage,
        }

    def _beside(self) -> dict[str, Any]:
        return {} if self._metrics is None else {"metrics": self._metrics}

    def _counted(self) -> dict[str, Any]:
        """Token counts; those of the prompt that were cached count apart."""
        cached = (self._usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return {
            "input_tokens": self._usage.get("prompt_tokens", 0) - cached,
            "output_tokens": self._usage.get("completion_tokens", 0),
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
        }

    def _called(self, call: CallPiece) -> Iterator[Event]:
        if call.index != self._call:
            self._call = call.index
            yield from self._close()
            block: dict[str, Any] = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            yield from self._open("tool_use", block)
        if call.arguments:
            self._arguments += call.arguments
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _open(self, kind: str, block: dict[str, Any]) -> Iterator[Event]:
        """Begin a block, if the last one is of another kind or has ended."""
        if self.content and self.content[-1]["type"] == kind and not self._closed:
            return
        yield from self._close()
        self.content.append(block)
        self._closed = False
        yield {"type": "content_block_start", "index": len(self.content) - 1, "content_block": dict(block)}

    def _close(self) -> Iterator[Event]:
        """End the last block."""
        if self._closed:
            return
        self._closed, block = True, self.content[-1]
        if block["type"] == "thinking":
            block["signature"] = hashlib.sha256(block["thinking"].encode()).hexdigest()
            yield self._delta({"type": "signature_delta", "signature": block["signature"]})
        if block["type"] == "tool_use":
            block["input"], self._arguments = _arguments(self._arguments), ""
        yield {"type": "content_block_stop", "index": len(self.content) - 1}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}


def _arguments(text: str) -> dict[str, Any]:
    """The arguments of a call. The output may have ended inside of them; then there are none."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
