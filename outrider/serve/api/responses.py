"""POST /v1/responses: OpenAI's newer format. No response is stored."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outrider.serve.api.bodies import read
from outrider.serve.api.call import Writer, respond
from outrider.serve.api.errors import served
from outrider.serve.api.gateway import gateway_of
from outrider.serve.api.openapi import POSTED, body_of, errors
from outrider.serve.api.request import AnswerFormat, admit, request_of
from outrider.serve.api.responses_body import ResponsesRequest
from outrider.serve.api.sse import written
from outrider.serve.api.tokens import TokenLogprob
from outrider.serve.api.usage import TokenUsage, metrics_of, usage_of
from outrider.serve.errors import ServeError
from outrider.serve.run.outputs import Delta
from outrider.serve.run.parser import Piece

router = APIRouter()
UNSTORED = errors(401, 404)
Event = dict[str, Any]
Fields = dict[str, Any]


@router.post("/v1/responses", responses=POSTED, openapi_extra=body_of(ResponsesRequest))
async def responses(request: Request) -> Response:
    """Answer an input of messages, calls and their outputs."""
    gateway = gateway_of(request)
    body = await read(request, ResponsesRequest, gateway.service.limits)
    admit(gateway, request, body)
    body.check(gateway.service.limits.max_logprobs)
    tools = body.tool_use(gateway)
    asked = await request_of(
        gateway,
        body,
        body.chat_prompt(gateway, tools),
        most_tokens=body.max_output_tokens,
        format=AnswerFormat(stream=body.stream, logprobs=body.logprobs),
        response_format=body.form,
        tools=tools,
    )
    return await respond(gateway, request, asked, partial(ResponseWriter, body=body))


@router.get("/v1/responses/{id}", status_code=404, responses=UNSTORED)
@router.delete("/v1/responses/{id}", status_code=404, responses=UNSTORED)
@router.post("/v1/responses/{id}/cancel", status_code=404, responses=UNSTORED)
@router.get("/v1/responses/{id}/input_items", status_code=404, responses=UNSTORED)
async def stored(id: str) -> Response:
    """Nothing is stored."""
    raise ServeError(404, f"there is no response {id[:200]!r}, because none is stored", param="id")


@dataclass
class ResponseWriter(Writer):
    """Writes a response, or its events.

    Attributes:
        body: The request, which the response quotes.
    """

    body: ResponsesRequest = field(kw_only=True)
    _output: list[Fields] = field(default_factory=list)
    _closed: bool = True
    _sent: int = 0

    def begin(self) -> list[bytes]:
        """The first events."""
        names = ("response.created", "response.in_progress")
        return written([self._event(name, response=self._response("in_progress")) for name in names])

    def add(self, delta: Delta) -> list[bytes]:
        """The events of a delta, in one write."""
        return written(list(self._events(delta)))

    def end(self) -> list[bytes]:
        """The last events."""
        events = list(self._finish())
        response = self.whole()
        return written([*events, self._event(f"response.{response['status']}", response=response)])

    def failed(self, error: Exception) -> list[bytes]:
        """The error, in a response that failed."""
        reason = served(error)
        response = self._response("failed") | {"error": {"code": reason.code, "message": reason.message}}
        return written([self._event("response.failed", response=response)])

    def whole(self) -> Fields:
        """The answer at once."""
        for _ in self._finish():
            pass
        outputs = self.call.outputs
        response = self._response(self._status) | {"usage": _usage(usage_of(outputs))}
        metrics = metrics_of(self.gateway, outputs)
        return response if metrics is None else response | {"metrics": metrics}

    @property
    def _status(self) -> str:
        """The status of the whole response."""
        end = self.call.outputs[0].end
        return "incomplete" if end is not None and end.reason == "length" else "completed"

    def _response(self, status: str) -> Fields:
        """The response as it is now."""
        body = self.body
        return {
            "id": f"resp_{self.call.id}",
            "object": "response",
            "created_at": self.call.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.gateway.name,
            "output": [dict(item) for item in self._output],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
            "store": False,
            "background": False,
            "temperature": body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [{"strict": None, "parameters": None, **tool} for tool in body.tools or ()],
            "top_p": body.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "truncation": "disabled",
            "metadata": body.metadata or {},
            "usage": None,
        }

    def _events(self, delta: Delta) -> Iterator[Event]:
        for i, piece in enumerate(delta.pieces):
            if piece.kind == "call":
                yield from self._called(piece)
            elif piece.text and piece.kind == "reasoning":
                yield from self._reasoned(piece.text)
            elif piece.text:
                yield from self._spoken(piece.text, self._logprobs(delta) if i == 0 else [])

    def _finish(self) -> Iterator[Event]:
        """The events of the last item's end."""
        if not self._output:
            # An answer without text is an empty message.
            yield from self._spoken("", [])
        yield from self._close(self._status)

    def _reasoned(self, text: str) -> Iterator[Event]:
        if not self._is_open("reasoning"):
            part = {"type": "reasoning_text", "text": ""}
            yield from self._open({"id": self._name("rs"), "type": "reasoning", "summary": [], "content": []}, part)
        self._output[-1]["content"][0]["text"] += text
        yield self._event("response.reasoning_text.delta", **self._place(), delta=text)

    def _spoken(self, text: str, logprobs: list[TokenLogprob]) -> Iterator[Event]:
        if not self._is_open("message"):
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"id": self._name("msg"), "type": "message", "role": "assistant", "content": []}
            yield from self._open(item | {"status": "in_progress"}, part)
        part = self._output[-1]["content"][0]
        part["text"] += text
        part["logprobs"] = [*part["logprobs"], *logprobs]
        if text:
            yield self._event("response.output_text.delta", **self._place(), delta=text, logprobs=logprobs)

    def _called(self, piece: Piece) -> Iterator[Event]:
        if piece.id is not None:
            item = {"id": self._name("fc"), "type": "function_call", "call_id": piece.id, "name": piece.name}
            yield from self._open(item | {"arguments": "", "status": "in_progress"}, None)
        if piece.text:
            self._output[-1]["arguments"] += piece.text
            yield self._event("response.function_call_arguments.delta", **self._item(), delta=piece.text)

    def _logprobs(self, delta: Delta) -> list[TokenLogprob]:
        if self.format.logprobs is None:
            return []
        tokens, count = delta.tokens[: len(delta.logprobs)], self.format.logprobs
        return self.gateway.vocabulary.logprobs(tokens, delta.logprobs, delta.top, count=count, as_ids=False)

    def _is_open(self, kind: str) -> bool:
        return not self._closed and self._output[-1]["type"] == kind

    def _open(self, item: Fields, part: Fields | None) -> Iterator[Event]:
        """Begin an item, and its only part if it has one."""
        yield from self._close("completed")
        self._output.append(item)
        self._closed = False
        place = {"output_index": len(self._output) - 1}
        yield self._event("response.output_item.added", **place, item=_copy(item))
        if part is not None:
            item["content"].append(part)
            if item["type"] == "message":
                yield self._event("response.content_part.added", **self._place(), part=dict(part))

    def _close(self, status: str) -> Iterator[Event]:
        """End the last item."""
        if self._closed:
            return
        self._closed, item = True, self._output[-1]
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
        place = {"output_index": len(self._output) - 1}
        yield self._event("response.output_item.done", **place, item=_copy(item))

    def _item(self) -> Fields:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _place(self) -> Fields:
        return self._item() | {"content_index": 0}

    def _name(self, prefix: str) -> str:
        """The id of the next item."""
        return f"{prefix}_{self.call.id}-{len(self._output)}"

    def _event(self, kind: str, **fields: Any) -> Event:
        number, self._sent = self._sent, self._sent + 1
        return {"type": kind, "sequence_number": number, **fields}


def _copy(item: Fields) -> Fields:
    """An item that later chunks do not change."""
    content = item.get("content")
    return dict(item) if content is None else item | {"content": [dict(part) for part in content]}


def _usage(usage: TokenUsage) -> Fields:
    """Token counts in the format of responses."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": usage["total_tokens"],
    }
