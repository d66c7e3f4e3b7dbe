"""POST /v1/chat/completions."""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outrider.core.constraint import Constraint
from outrider.core.inputs import InputError
from outrider.serve.api.answers import answered, failed, streamed
from outrider.serve.api.bodies import ChatBody, NamedTool
from outrider.serve.api.calls import Call
from outrider.serve.api.chat_prompt import arguments_of, check_template, messages_of, reads
from outrider.serve.api.errors import of_input, refuse
from outrider.serve.api.formats import forced_tools
from outrider.serve.api.gateway import Gateway, gateway_of
from outrider.serve.api.jobs import check, choices_of, fitted, named
from outrider.serve.api.openapi import POSTED, body_of
from outrider.serve.api.outputs import Interval, OutputPart, OutputStream, metrics_of, usage_of, usage_so_far
from outrider.serve.api.sse import BLANK, DONE, IDS, Form, event
from outrider.serve.run.parser import Piece
from outrider.serve.run.thinking import BehindThinking

router = APIRouter()
Chunk = dict[str, Any]
"""An object `chat.completion.chunk`."""


@router.post("/v1/chat/completions", responses=POSTED, openapi_extra=body_of(ChatBody))
async def chat(request: Request) -> Response:
    """Answer the messages of a conversation."""
    gateway = gateway_of(request)
    answer = await ChatAnswer.begun(gateway, request, await gateway.read(request, ChatBody))
    if answer.body.stream:
        return streamed(gateway, answer.call, answer.events(), failed)
    return await answered(request, answer.call, answer.whole)


@dataclass(kw_only=True)
class Written:
    """The message of one output so far; changes in place."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)

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

    def message(self) -> dict[str, Any]:
        """The message as the answer has it."""
        found: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if self.calls:
            found["content"] = self.content or None
            found["tool_calls"] = self.calls
        if self.reasoning:
            found |= {"reasoning": self.reasoning, "reasoning_content": self.reasoning}
        return found


@dataclass(frozen=True, kw_only=True)
class _Due:
    """A part that is to be said.

    Attributes:
        begins: Whether it is the output's first.
        called: Whether the output has called a tool so far.
    """

    choice: OutputStream
    part: OutputPart
    begins: bool
    called: bool

    @property
    def is_text(self) -> bool:
        """Whether it is content and nothing else."""
        pieces = self.part.pieces
        return not (self.begins or self.part.ended) and len(pieces) == 1 and pieces[0].kind == "content"


@dataclass(kw_only=True)
class ChatAnswer:
    """A chat completion that is being answered. Other routes of chats put its chunks into their formats.

    Attributes:
        hides: Whether the reasoning, and what would give it away, is left out.
        call: The outputs at work; `call.close` cancels them.
    """

    gateway: Gateway
    body: ChatBody
    id: str
    created: int
    choices: Sequence[OutputStream]
    call: Call
    hides: bool

    @classmethod
    async def begun(cls, gateway: Gateway, request: Request, body: ChatBody) -> "ChatAnswer":
        """The answer, with its outputs queued. Raises ApiError or JobError if they cannot be."""
        body = check(gateway, request, body)
        _check_tools(gateway, body)
        prompt = fitted(await prompt_of(gateway, body), body, gateway, "messages")
        forced, tools = forced_tools(body), _listed(body)
        name: str | Literal[True] | None = None
        if forced:
            name = forced[0].function.name if isinstance(body.tool_choice, NamedTool) else True

        def wrap(inner: Constraint, eos_ids: frozenset[int], prompt: Sequence[int]) -> Constraint:
            return _behind_thinking(gateway, inner, eos_ids, prompt)

        reading = gateway.reading
        reads_text = name is not None or reading.template is not None
        with named(gateway, request, body) as id:
            choices = await choices_of(
                gateway,
                request,
                body,
                id,
                [prompt],
                reader=(lambda prompt: reading.reader(prompt, tools, name)) if reads_text else None,
                wrap=wrap,
            )
            call = Call.submit(gateway, request, id, choices)
        return cls(
            gateway=gateway,
            body=body,
            id=f"chatcmpl-{id}",
            created=int(time.time()),
            choices=choices,
            call=call,
            hides=not body.include_reasoning,
        )

    async def whole(self) -> dict[str, Any]:
        """The answer at once."""
        written = [Written() for _ in self.choices]
        async for choice, part in self.call.parts():
            own = written[choice.index]
            for piece in part.pieces:
                own.add(piece)
            own.logprobs += self._logprobs(part) or []
        choices = []
        for choice, own in zip(self.choices, written, strict=True):
            if self.hides:
                own.reasoning = ""
            found = self._choice(choice, {"message": own.message()}, own.logprobs, ended=True)
            if self.body.return_token_ids and not self.hides:
                found["token_ids"] = choice.tokens
            choices.append(found)
        answer = self._object("chat.completion", choices) | {
            "usage": usage_of(self.choices),
            "system_fingerprint": self.gateway.fingerprint,
            "metrics": metrics_of(self.gateway, self.choices),
        }
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = list(self.choices[0].job.prompt)
        return answer

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as a stream."""
        forms = self._forms()
        async for due in self._dues():
            if forms and due.is_text:
                yield forms[due.choice.index].filled(due.part.pieces[0].text, due.part.tokens)
            else:
                for chunk in self._chunks_of(due):
                    yield event(chunk)
        for chunk in self._last():
            yield event(chunk)
        yield DONE

    async def chunks(self) -> AsyncIterator[Chunk]:
        """The chunks of the answer."""
        async for due in self._dues():
            for chunk in self._chunks_of(due):
                yield chunk
        for chunk in self._last():
            yield chunk

    async def _dues(self) -> AsyncIterator["_Due"]:
        """What is to be said, in the order in which it comes."""
        intervals = [Interval(self.body.stream_interval) for _ in self.choices]
        begun, called = set[int](), set[int]()
        async for choice, part in self.call.parts():
            for piece in part.pieces:
                if piece.kind == "call":
                    called.add(choice.index)
            found = intervals[choice.index].add(part)
            if found is not None:
                # The first part is never held back.
                begins = choice.index not in begun
                begun.add(choice.index)
                yield _Due(choice=choice, part=found, begins=begins, called=choice.index in called)

    def _last(self) -> list[Chunk]:
        """The chunk behind all text, if it is wanted."""
        options = self.body.stream_options
        if options is None or not options.include_usage:
            return []
        last = {"usage": usage_of(self.choices), "metrics": metrics_of(self.gateway, self.choices)}
        return [self._object("chat.completion.chunk", []) | last]

    def _forms(self) -> list[Form]:
        """The events of each output's content, where nothing but text and token ids differs; otherwise none."""
        options, found = self.body.stream_options, []
        counts = options is not None and options.continuous_usage_stats
        if self.body.logprobs or counts:
            return []
        for choice in self.choices:
            chunk = self._chunk(choice, {"content": BLANK}, None)
            if self.body.return_token_ids and not self.hides:
                chunk["choices"][0]["token_ids"] = IDS
            found.append(Form(chunk))
        return found

    def _chunks_of(self, due: "_Due") -> list[Chunk]:
        """The chunks of a part: one for each kind of text, the last one with the reason of the end."""
        choice, part = due.choice, due.part
        found = [self._chunk(choice, {"role": "assistant", "content": ""}, None)] if due.begins else []
        deltas = [delta for piece in part.pieces if (delta := self._delta(piece)) is not None]
        logprobs = self._logprobs(part)
        if not deltas and (part.ended or logprobs or (self.body.return_token_ids and part.tokens)):
            deltas = [{} if part.ended else {"content": ""}]
        for i, delta in enumerate(deltas):
            last = part.ended and i == len(deltas) - 1
            chunk = self._chunk(choice, delta, (logprobs or []) if i == 0 else None, ended=last, called=due.called)
            if self.body.return_token_ids and not self.hides:
                chunk["choices"][0]["token_ids"] = list(part.tokens) if i == 0 else []
            found.append(chunk)
        return found

    def _delta(self, piece: Piece) -> dict[str, Any] | None:
        if piece.kind == "content":
            return {"content": piece.text}
        if piece.kind == "reasoning":
            return None if self.hides else {"reasoning": piece.text, "reasoning_content": piece.text}
        call: dict[str, Any] = {"index": piece.call, "function": {"arguments": piece.text}}
        if piece.id is not None:
            function = {"name": piece.name, "arguments": piece.text}
            call = {"index": piece.call, "id": piece.id, "type": "function", "function": function}
        return {"tool_calls": [call]}

    def _chunk(
        self,
        choice: OutputStream,
        delta: dict[str, Any],
        logprobs: list[Any] | None,
        *,
        ended: bool = False,
        called: bool = False,
    ) -> Chunk:
        found = self._choice(choice, {"delta": delta}, logprobs, ended=ended, called=called)
        chunk = self._object("chat.completion.chunk", [found])
        options = self.body.stream_options
        if options is not None and options.continuous_usage_stats:
            chunk["usage"] = usage_so_far(choice)
        if ended:
            chunk["system_fingerprint"] = self.gateway.fingerprint
        return chunk

    def _choice(
        self,
        choice: OutputStream,
        said: dict[str, Any],
        logprobs: list[Any] | None,
        *,
        ended: bool,
        called: bool = False,
    ) -> dict[str, Any]:
        """A choice of an answer or a chunk."""
        calls = called or bool(said.get("message", {}).get("tool_calls"))
        wanted = self.body.logprobs and not self.hides and logprobs is not None
        return {
            "index": choice.index,
            **said,
            "logprobs": {"content": logprobs, "refusal": None} if wanted else None,
            "finish_reason": self._reason(choice, calls) if ended else None,
            "stop_reason": choice.stop_reason if ended else None,
        }

    def _reason(self, choice: OutputStream, calls: bool) -> str:
        """Why an output ended. A call that was asked for by name ends like text."""
        if choice.finish_reason == "length":
            return "length"
        return "tool_calls" if calls and not isinstance(self.body.tool_choice, NamedTool) else "stop"

    def _logprobs(self, part: OutputPart) -> list[Any] | None:
        if not self.body.logprobs or self.hides:
            return None
        return list(
            self.gateway.vocabulary.logprobs(
                part.tokens[: len(part.own)],
                part.own,
                part.top,
                count=self.body.top_logprobs or 0,
                as_ids=self.body.return_tokens_as_token_ids,
            )
        )

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.gateway.name,
            "choices": choices,
        }


async def prompt_of(gateway: Gateway, body: ChatBody) -> list[int]:
    """The token ids of a conversation. Raises ApiError if the template makes none of it."""
    service = gateway.service
    check_template(gateway, body)
    if body.add_generation_prompt and body.continue_final_message and "add_generation_prompt" in body.model_fields_set:
        refuse("continue_final_message", "give add_generation_prompt or continue_final_message, not both")
    tools = _listed(body)
    if forced_tools(body) and not reads(service.tokenizer, "tools", body.chat_template):
        # The grammar alone forces the call.
        tools = []
    try:
        return await service.encode_chat(
            messages_of(body.messages),
            tools=tools or None,
            documents=body.documents,
            kwargs=arguments_of(body),
            generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            continue_final=body.continue_final_message,
        )
    except InputError as error:
        raise of_input(error) from None


def _listed(body: ChatBody) -> list[dict[str, Any]]:
    """The tools that the model may call."""
    if body.tool_choice == "none":
        return []
    return [tool.model_dump(exclude_none=True) for tool in body.tools or []]


def _check_tools(gateway: Gateway, body: ChatBody) -> None:
    """Raise ApiError for tools that cannot be used."""
    choice, limit = body.tool_choice, gateway.service.limits.max_tools
    if body.tools is None:
        if choice not in (None, "none"):
            refuse("tool_choice", "tool_choice can be given with tools alone")
        return
    if not 0 < len(body.tools) <= limit:
        refuse("tools", f"tools must hold 1 .. {limit} tools, got {len(body.tools)}")
    if isinstance(choice, NamedTool) and not forced_tools(body):
        names = ", ".join(tool.function.name for tool in body.tools)
        refuse("tool_choice", f"tool_choice names {choice.function.name!r}, which is not among the tools: {names}")
    if choice in (None, "auto") and not gateway.reading.calls:
        refuse(
            "tools",
            f"this model's tool calls cannot be told apart in its text ({gateway.reading.name}); give tool_choice "
            "'required' or a function, or start the server with --response-template FILE",
        )


def _behind_thinking(gateway: Gateway, inner: Constraint, eos_ids: frozenset[int], prompt: Sequence[int]) -> Constraint:
    """The constraint, to hold behind the reasoning where the model reasons."""
    marks, tokenizer = gateway.reading.thinking, gateway.service.tokenizer
    if marks is None:
        return inner
    opens, closes = (tuple(tokenizer.encode(mark, add_special_tokens=False)) for mark in marks)
    width = gateway.service.engine.parts.target.vocab_size
    return BehindThinking(
        inner=inner,
        opens=opens[0] if len(opens) == 1 else None,
        closes=closes,
        inside=gateway.reading.reader(prompt, (), None).reasons,
        eos_ids=eos_ids,
        num_words=-(-width // 32),
    )
