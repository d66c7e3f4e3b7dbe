"""POST /v1/messages and its count of tokens: Anthropic's format."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outrider.serve.api.bodies import read
from outrider.serve.api.call import Writer, respond
from outrider.serve.api.errors import anthropic_error, served
from outrider.serve.api.gateway import gateway_of
from outrider.serve.api.messages_body import CountRequest, MessagesRequest
from outrider.serve.api.openapi import ANTHROPICS_ERROR, CHECKED, MESSAGES, answers, body_of, errors
from outrider.serve.api.request import AnswerFormat, admit, request_of
from outrider.serve.api.sse import JsonResponse, event, written
from outrider.serve.api.usage import TokenUsage, metrics_of, usage_of, usage_so_far
from outrider.serve.run.outputs import Delta
from outrider.serve.run.parser import Piece

router = APIRouter()
COUNTED = errors(*(int(status) for status in CHECKED), schema=ANTHROPICS_ERROR) | answers("application/json")
Event = dict[str, Any]


@router.post("/v1/messages", responses=MESSAGES, openapi_extra=body_of(MessagesRequest))
async def messages(request: Request) -> Response:
    """Answer the messages of a conversation."""
    gateway = gateway_of(request)
    body = await read(request, MessagesRequest, gateway.service.limits)
    admit(gateway, request, body)
    body.check()
    tools = body.tool_use(gateway)
    asked = await request_of(
        gateway,
        body,
        body.prompt(gateway, tools),
        most_tokens=body.max_tokens,
        format=AnswerFormat(stream=body.stream),
        stops=body.stop_sequences or (),
        response_format=body.form,
        tools=tools,
    )
    return await respond(gateway, request, asked, MessageWriter)


@router.post("/v1/messages/count_tokens", responses=COUNTED, openapi_extra=body_of(CountRequest))
async def count_tokens(request: Request) -> Response:
    """Count the tokens of the prompt that a request would have, tools included."""
    gateway = gateway_of(request)
    body = await read(request, CountRequest, gateway.service.limits)
    gateway.check_model(body.model)
    prompt = body.prompt(gateway, body.tool_use(gateway))
    return JsonResponse({"input_tokens": len(await gateway.service.encode_chat(prompt))})


@dataclass
class MessageWriter(Writer):
    """Writes a message, or its events."""

    pulse = event({"type": "ping"}, "ping")

    _content: list[dict[str, Any]] = field(default_factory=list)
    _is_open: bool = False
    _arguments: str = ""

    def add(self, delta: Delta) -> list[bytes]:
        """The events of a delta, in one write; the first ones say how long the prompt is."""
        events = list(self._events(delta))
        if delta.first:
            counts = _counted(usage_so_far(delta.output)) | {"output_tokens": 0}
            start = self._message(counts) | {"content": [], "stop_reason": None, "stop_sequence": None}
            events = [{"type": "message_start", "message": start}, *events]
        return written(events)

    def end(self) -> list[bytes]:
        """The last events."""
        events = list(self._close())
        message = self.whole()
        ends = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        beside: dict[str, Any] = {name: message[name] for name in ("usage", "metrics") if name in message}
        return written([*events, {"type": "message_delta", "delta": ends, **beside}, {"type": "message_stop"}])

    def failed(self, error: Exception) -> list[bytes]:
        """The error."""
        request_id = self.call.http.scope["state"]["request_id"]
        return [event(anthropic_error(served(error), request_id), "error")]

    def whole(self) -> dict[str, Any]:
        """The answer at once."""
        for _ in self._close():
            pass
        metrics = metrics_of(self.gateway, self.call.outputs)
        message = self._message(_counted(usage_of(self.call.outputs)))
        return message if metrics is None else message | {"metrics": metrics}

    def _message(self, usage: dict[str, Any]) -> dict[str, Any]:
        end = self.call.outputs[0].end
        reason, sequence = None, None
        if end is not None:
            reason = "max_tokens" if end.reason == "length" else "tool_use" if end.called else "end_turn"
            if reason == "end_turn" and isinstance(end.stopped_by, str):
                reason, sequence = "stop_sequence", end.stopped_by
        return {
            "id": f"msg_{self.call.id}",
            "type": "message",
            "role": "assistant",
            "model": self.gateway.name,
            "content": self._content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage,
        }

    def _events(self, delta: Delta) -> Iterator[Event]:
        for piece in delta.pieces:
            if piece.kind == "call":
                yield from self._called(piece)
            elif piece.text:
                yield from self._spoken(piece)

    def _spoken(self, piece: Piece) -> Iterator[Event]:
        """The events of more reasoning or more text."""
        kind = "thinking" if piece.kind == "reasoning" else "text"
        block = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
        yield from self._open(block)
        self._content[-1][kind] += piece.text
        yield self._delta({"type": f"{kind}_delta", kind: piece.text})

    def _called(self, piece: Piece) -> Iterator[Event]:
        """The events of a call, or of more of its arguments."""
        if piece.id is not None:
            yield from self._close()
            yield from self._open({"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}})
        if piece.text:
            self._arguments += piece.text
            yield self._delta({"type": "input_json_delta", "partial_json": piece.text})

    def _open(self, block: dict[str, Any]) -> Iterator[Event]:
        """Begin a block, if the last one is of another kind or has ended."""
        if self._is_open and self._content[-1]["type"] == block["type"]:
            return
        yield from self._close()
        self._content.append(block)
        self._is_open = True
        yield {"type": "content_block_start", "index": len(self._content) - 1, "content_block": dict(block)}

    def _close(self) -> Iterator[Event]:
        """End the last block."""
        if not self._is_open:
            return
        self._is_open, block = False, self._content[-1]
        if block["type"] == "thinking":
            block["signature"] = hashlib.sha256(block["thinking"].encode()).hexdigest()
            yield self._delta({"type": "signature_delta", "signature": block["signature"]})
        if block["type"] == "tool_use":
            block["input"], self._arguments = _parsed(self._arguments), ""
        yield {"type": "content_block_stop", "index": len(self._content) - 1}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}


def _counted(usage: TokenUsage) -> dict[str, Any]:
    """Token counts; those of the prompt that were cached count apart."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "output_tokens": usage["completion_tokens"],
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }


def _parsed(text: str) -> dict[str, Any]:
    """The arguments of a call. The output may have ended inside of them; then there are none."""
    try:
        arguments = json.loads(text or "{}")
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}
