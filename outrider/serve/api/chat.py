"""POST /v1/chat/completions."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outrider.serve.api.bodies import ChatBody, read
from outrider.serve.api.call import ChoicesWriter, respond
from outrider.serve.api.gateway import gateway_of
from outrider.serve.api.grammars import ToolUse
from outrider.serve.api.openapi import POSTED, body_of
from outrider.serve.api.prompts import chat_prompt
from outrider.serve.api.request import admit, answer_format, request_of
from outrider.serve.api.sse import BLANK, IDS, Form
from outrider.serve.api.tokens import TokenLogprob
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
class ChatWriter(ChoicesWriter):
    """Writes a chat completion, or its chunks."""

    kinds, prefix = ("chat.completion", "chat.completion.chunk"), "chatcmpl"
    _messages: defaultdict[int, _Message] = field(default_factory=lambda: defaultdict(_Message))

    def begin(self) -> list[bytes]:
        """Nothing; the form of events of content is made, where nothing but text and token ids differs in them."""
        if self.format.logprobs is None and not self.format.counts:
            for output in self.call.outputs:
                choice = self._choice(output, {"delta": {"content": BLANK}}, ids=IDS)
                self._forms.append(Form(self._chunk(output, choice)))
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
        begun = self._choice(output, {"delta": {"role": "assistant", "content": ""}})
        chunks = [self._chunk(output, begun)] if delta.first else []
        ids: Sequence[int] = list(delta.tokens)
        for i, change in enumerate(changes, 1):
            ended = delta.end is not None and i == len(changes)
            choice = self._choice(output, {"delta": change}, logprobs, ids=ids, ended=ended)
            chunks.append(self._chunk(output, choice, ended=ended))
            logprobs, ids = None, []
        return chunks

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
            choices.append(self._choice(output, fields, message.logprobs, ids=output.tokens, ended=True))
        answer = self._answer(choices)
        return answer | {"prompt_token_ids": list(outputs[0].task.prompt)} if self.format.token_ids else answer

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

    def _choice(
        self,
        output: OutputStream,
        fields: dict[str, Any],
        logprobs: list[TokenLogprob] | None = None,
        *,
        ids: Sequence[int] | str | None = None,
        ended: bool = False,
    ) -> dict[str, Any]:
        """A choice of an answer or a chunk.

        Args:
            ids: Its token ids, or what stands for them. They would give hidden reasoning away, as log-probabilities
                would.
        """
        shows = self.format.logprobs is not None and self.format.reasoning and logprobs is not None
        end, reason = output.end if ended else None, None
        if end is not None:
            # A call that was asked for by name ends like text.
            called = end.called and end.reason == "stop" and not self.call.request.tools.named
            reason = "tool_calls" if called else end.reason
        choice = {
            "index": output.index,
            **fields,
            "logprobs": {"content": logprobs, "refusal": None} if shows else None,
            "finish_reason": reason,
            "stop_reason": None if end is None else end.stopped_by,
        }
        shows_ids = self.format.token_ids and self.format.reasoning and ids is not None
        return choice | {"token_ids": ids} if shows_ids else choice

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
