"""The answer of /v1/responses: the chunks of a chat completion become output items and their events."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.serve.api.chunks import CallPiece, Chunk, read
from outrider.serve.api.responses_body import ResponsesRequest

Event = dict[str, Any]
Fields = dict[str, Any]


@dataclass(kw_only=True)
class ResponseAnswer:
    """A response that grows with each chunk; changes in place.

    Attributes:
        id: With `resp_` at its beginning.
        output: Its items so far.
    """

    id: str
    model: str
    request: ResponsesRequest
    created: int = field(default_factory=lambda: int(time.time()))
    output: list[Fields] = field(default_factory=list)
    _usage: Mapping[str, Any] | None = None
    _metrics: Mapping[str, Any] | None = None
    _finish: str | None = None
    _call: int = -1
    _closed: bool = True
    _sent: int = 0

    def start(self) -> Iterator[Event]:
        """The first events."""
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self.response("in_progress"))

    def add(self, chunk: Chunk) -> Iterator[Event]:
        """The events of a chunk."""
        piece = read(chunk)
        self._usage = piece.usage or self._usage
        self._metrics = piece.metrics or self._metrics
        if piece.reasoning:
            yield from self._reasoned(piece.reasoning)
        if piece.text:
            yield from self._said(piece.text, [_logprob(each) for each in piece.logprobs])
        for call in piece.calls:
            yield from self._called(call)
        self._finish = piece.finish_reason or self._finish

    def end(self) -> Iterator[Event]:
        """The last events."""
        if not self.output:
            # An answer without text is an empty message.
            yield from self._said("", [])
        yield from self._close("incomplete" if self._finish == "length" else "completed")
        found = self.response()
        yield self._event(f"response.{found['status']}", response=found)

    def fail(self, code: str, message: str) -> Event:
        """The last event of a response that an error ended."""
        failed = self.response("failed") | {"error": {"code": code, "message": message}}
        return self._event("response.failed", response=failed)

    def response(self, status: str | None = None) -> Fields:
        """The response as it is now.

        Args:
            status: None: it has ended.
        """
        asked = self.request
        if status is None:
            status = "incomplete" if self._finish == "length" else "completed"
        found: Fields = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "model": self.model,
            "output": [dict(item) for item in self.output],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (asked.reasoning or {}).get("effort"), "summary": None},
            "store": False,
            "background": False,
            "temperature": asked.temperature,
            "text": asked.text or {"format": {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": [{"strict": None, "parameters": None, **tool} for tool in asked.tools or ()],
            "top_p": asked.top_p,
            "top_logprobs": asked.top_logprobs or 0,
            "truncation": "disabled",
            "metadata": asked.metadata or {},
            "usage": None if self._usage is None else _usage(self._usage),
        }
        return found if self._metrics is None else found | {"metrics": self._metrics}

    def _reasoned(self, text: str) -> Iterator[Event]:
        if not self._is_open("reasoning"):
            part = {"type": "reasoning_text", "text": ""}
            yield from self._open({"id": self._name("rs"), "type": "reasoning", "summary": [], "content": []}, part)
        self.output[-1]["content"][0]["text"] += text
        yield self._event("response.reasoning_text.delta", **self._place(), delta=text)

    def _said(self, text: str, logprobs: list[Fields]) -> Iterator[Event]:
        if not self._is_open("message"):
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"id": self._name("msg"), "type": "message", "role": "assistant", "content": []}
            yield from self._open(item | {"status": "in_progress"}, part)
        part = self.output[-1]["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        if text:
            yield self._event("response.output_text.delta", **self._place(), delta=text, logprobs=logprobs)

    def _called(self, call: CallPiece) -> Iterator[Event]:
        if call.index != self._call:
            self._call = call.index
            item = {"id": self._name("fc"), "type": "function_call", "call_id": call.id, "name": call.name}
            yield from self._open(item | {"arguments": "", "status": "in_progress"}, None)
        if call.arguments:
            self.output[-1]["arguments"] += call.arguments
            yield self._event("response.function_call_arguments.delta", **self._item(), delta=call.arguments)

    def _is_open(self, kind: str) -> bool:
        return not self._closed and self.output[-1]["type"] == kind

    def _open(self, item: Fields, part: Fields | None) -> Iterator[Event]:
        """Begin an item, and its only part if it has one."""
        yield from self._close("completed")
        self.output.append(item)
        self._closed = False
        place = {"output_index": len(self.output) - 1}
        yield self._event("response.output_item.added", **place, item=_copy(item))
        if part is not None:
            item["content"].append(part)
            if item["type"] == "message":
                yield self._event("response.content_part.added", **self._place(), part=dict(part))

    def _close(self, status: str) -> Iterator[Event]:
        """End the last item."""
        if self._closed:
            return
        self._closed, item = True, self.output[-1]
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **self._item(), **done)
        else:
            [part] = item["content"]
            text = {"text": part["text"]}
            if item["type"] == "reasoning":
                yield self._event("response.reasoning_text.done", **self._place(), **text)
            else:
                yield self._event("response.output_text.done", **self._place(), **text, logprobs=part["logprobs"])
                yield self._event("response.content_part.done", **self._place(), part=dict(part))
        item["status"] = status
        place = {"output_index": len(self.output) - 1}
        yield self._event("response.output_item.done", **place, item=_copy(item))

    def _item(self) -> Fields:
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}

    def _place(self) -> Fields:
        return self._item() | {"content_index": 0}

    def _name(self, prefix: str) -> str:
        """The id of the next item."""
        return f"{prefix}_{self.id.removeprefix('resp_')}-{len(self.output)}"

    def _event(self, kind: str, **fields: Any) -> Event:
        number, self._sent = self._sent, self._sent + 1
        return {"type": kind, "sequence_number": number, **fields}


def _copy(item: Fields) -> Fields:
    """An item that later chunks do not change."""
    content = item.get("content")
    return dict(item) if content is None else item | {"content": [dict(part) for part in content]}


def _logprob(entry: Mapping[str, Any]) -> Fields:
    """The log-probability of a token, with those of the likeliest ones."""
    names = ("token", "logprob", "bytes")
    top = [{name: each[name] for name in names} for each in entry.get("top_logprobs") or ()]
    return {name: entry[name] for name in names} | {"top_logprobs": top}


def _usage(usage: Mapping[str, Any]) -> Fields:
    """Token counts in the format of responses."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    reasoning = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage["total_tokens"],
    }
