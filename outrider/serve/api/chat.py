"""POST /v1/chat/completions."""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outrider.serve.api.bodies import ChatBody, read
from outrider.serve.api.call import Writer, respond
from outrider.serve.api.gateway import gateway_of
from outrider.serve.api.grammars import ToolUse
from outrider.serve.api.openapi import POSTED, body_of
from outrider.serve.api.prompts import chat_prompt
from outrider.serve.api.request import admit, answer_format, request_of
from outrider.serve.api.sse import BLANK, DONE, IDS, Form, event
from outrider.serve.api.tokens import TokenLogprob
from outrider.serve.api.usage import usage_so_far
from outrider.serve.errors import refuse
from outrider.serve.run.outputs import Delta, OutputStream
from outrider.serve.run.parser import Piece

router = APIRouter()


@router.post("/v1/chat/completions", responses=POSTED, openapi_extra=body_of(ChatBody))
async def chat(request: Request) -> Response:
    """Answer the messages of a conversation."""
    gateway = gateway_of(request)
    limits = gateway.service.limits
    body = await read(request, ChatBody, limits)
    admit(gateway, request, body)
    tools = ToolUse.of(body.tools, body.tool_choice, several=body.parallel_tool_calls, limits=limits)
    if body.add_generation_prompt and body.continue_final_message and "add_generation_prompt" in body.model_fields_set:
        refuse("continue_final_message", "give add_generation_prompt or continue_final_message, not both")
    if body.top_logprobs and not body.logprobs:
        refuse("top_logprobs", "top_logprobs needs logprobs: true")
    if body.max_tokens == 0:
        refuse("max_tokens", "max_completion_tokens must be >= 1; 0 is for completions with echo, got 0")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    format = answer_format(body, limits, logprobs=logprobs, param="top_logprobs")
    asked = await request_of(
        gateway,
        body,
        chat_prompt(gateway, body, tools),
        most_tokens=body.max_completion_tokens or body.max_tokens,
        format=replace(format, reasoning=body.include_reasoning),
        response_format=body.response_format,
        tools=tools,
    )
    return await respond(gateway, request, asked, ChatWriter)


@dataclass(kw_only=True)
class _Message:
    """The message of one output so far; changes in place."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        """Append a piece."""
        if piece.kind == "content":
            self.content += piece.text
        elif piece.kind == "reasoning":
            self.reasoning += piece.text
        else:
            if piece.id is not None:
                function = {"name": piece.name, "arguments": ""}
                self.calls.append({"id": piece.id, "type": "function", "function": function})
            self.calls[-1]["function"]["arguments"] += piece.text

    def json(self, *, reasoning: bool) -> dict[str, Any]:
        """The message as the answer has it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if self.calls:
            message |= {"content": self.content or None, "tool_calls": self.calls}
        if self.reasoning and reasoning:
            message |= {"reasoning": self.reasoning, "reasoning_content": self.reasoning}
        return message


@dataclass
class ChatWriter(Writer):
    """Writes a chat completion, or its chunks."""

    _messages: defaultdict[int, _Message] = field(default_factory=lambda: defaultdict(_Message))

    def begin(self) -> list[bytes]:
        """Nothing; the form of events of content is made, where nothing but text and token ids differs in them."""
        if self.format.logprobs is None and not self.format.counts:
            for output in self.call.outputs:
                chunk = self._chunk(output, {"content": BLANK}, None)
                if self._shows_ids:
                    chunk["choices"][0]["token_ids"] = IDS
                self._forms.append(Form(chunk))
        return []

    def add(self, delta: Delta) -> list[bytes]:
        """The chunks of a delta: one for each piece, the last one with the reason of the end."""
        pieces, output = delta.pieces, delta.output
        is_text = not (delta.first or delta.end) and len(pieces) == 1 and pieces[0].kind == "content"
        if self._forms and is_text:
            return [self._forms[output.index].filled(delta.text, delta.tokens)]
        logprobs = self._logprobs(delta)
        changes = [change for piece in pieces if (change := self._change(piece)) is not None]
        if not changes and (delta.end or logprobs or (self.format.token_ids and delta.tokens)):
            changes = [{} if delta.end else {"content": ""}]
        chunks = [self._chunk(output, {"role": "assistant", "content": ""}, None)] if delta.first else []
        for i, change in enumerate(changes):
            last = delta.end is not None and i == len(changes) - 1
            chunk = self._chunk(output, change, logprobs if i == 0 else None, ended=last)
            if self._shows_ids:
                chunk["choices"][0]["token_ids"] = list(delta.tokens) if i == 0 else []
            chunks.append(chunk)
        return [event(chunk) for chunk in chunks]

    def end(self) -> list[bytes]:
        """The numbers of tokens, if they are wanted, and the end."""
        if not self.format.usage:
            return [DONE]
        return [event(self._choices("chat.completion.chunk", "chatcmpl", []) | self._sums()), DONE]

    def take(self, delta: Delta) -> None:
        """Note a delta of an answer that comes at once."""
        message = self._messages[delta.output.index]
        for piece in delta.pieces:
            message.add(piece)
        message.logprobs += self._logprobs(delta) or []

    def whole(self) -> dict[str, Any]:
        """The answer at once."""
        outputs, choices = self.call.outputs, []
        for output in outputs:
            message = self._messages[output.index]
            fields = {"message": message.json(reasoning=self.format.reasoning)}
            choice = self._choice(output, fields, message.logprobs, ended=True)
            if self._shows_ids:
                choice["token_ids"] = output.tokens
            choices.append(choice)
        sums = self._sums()
        answer = self._choices("chat.completion", "chatcmpl", choices) | {
            "usage": sums["usage"],
            "system_fingerprint": self.gateway.fingerprint,
            "metrics": sums["metrics"],
        }
        return answer | {"prompt_token_ids": list(outputs[0].task.prompt)} if self.format.token_ids else answer

    @property
    def _shows_ids(self) -> bool:
        """Whether token ids are shown. They would give hidden reasoning away, as log-probabilities would."""
        return self.format.token_ids and self.format.reasoning

    def _change(self, piece: Piece) -> dict[str, Any] | None:
        """A piece as the `delta` of a chunk; None if it is not shown."""
        if piece.kind == "content":
            return {"content": piece.text}
        if piece.kind == "reasoning":
            return {"reasoning": piece.text, "reasoning_content": piece.text} if self.format.reasoning else None
        call: dict[str, Any] = {"index": piece.call, "function": {"arguments": piece.text}}
        if piece.id is not None:
            function = {"name": piece.name, "arguments": piece.text}
            call = {"index": piece.call, "id": piece.id, "type": "function", "function": function}
        return {"tool_calls": [call]}

    def _chunk(
        self, output: OutputStream, change: dict[str, Any], logprobs: list[TokenLogprob] | None, *, ended: bool = False
    ) -> dict[str, Any]:
        choice = self._choice(output, {"delta": change}, logprobs, ended=ended)
        chunk = self._choices("chat.completion.chunk", "chatcmpl", [choice])
        if self.format.counts:
            chunk["usage"] = usage_so_far(output)
        if ended:
            chunk["system_fingerprint"] = self.gateway.fingerprint
        return chunk

    def _choice(
        self, output: OutputStream, fields: dict[str, Any], logprobs: list[TokenLogprob] | None, *, ended: bool
    ) -> dict[str, Any]:
        """A choice of an answer or a chunk."""
        shows = self.format.logprobs is not None and self.format.reasoning and logprobs is not None
        end, reason = output.end if ended else None, None
        if end is not None:
            # A call that was asked for by name ends like text.
            called = end.called and end.reason == "stop" and not self.call.request.tools.named
            reason = "tool_calls" if called else end.reason
        return {
            "index": output.index,
            **fields,
            "logprobs": {"content": logprobs, "refusal": None} if shows else None,
            "finish_reason": reason,
            "stop_reason": None if end is None else end.stopped_by,
        }

    def _logprobs(self, delta: Delta) -> list[TokenLogprob] | None:
        """The log-probabilities of a delta's tokens, where they are shown."""
        if self.format.logprobs is None or not self.format.reasoning:
            return None
        return self.gateway.vocabulary.logprobs(
            delta.tokens[: len(delta.logprobs)],
            delta.logprobs,
            delta.top,
            count=self.format.logprobs,
            as_ids=self.format.as_ids,
        )
