"""One HTTP request at work: its outputs are submitted together, read together and cancelled together."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from outrider import catalog
from outrider.constraints.grammar import Grammar
from outrider.core.constraint import Constraint
from outrider.engine.requests import nth
from outrider.engine.text import Ending
from outrider.serve.api.errors import openai_error, served
from outrider.serve.api.gateway import Gateway, request_id
from outrider.serve.api.request import AnswerFormat, ClientRequest, RequestPrompt
from outrider.serve.api.sse import DONE, KEEP_ALIVE, EventStream, Form, JsonResponse, cancelled, event, gone
from outrider.serve.api.usage import metrics_of, usage_of, usage_so_far
from outrider.serve.observe.record import RequestRecord
from outrider.serve.run.outputs import Delta, OutputStream, OutputTask, Ticket, merged
from outrider.serve.run.parser import PlainReader
from outrider.serve.run.thinking import BehindThinking

Result = TypeVar("Result")


@dataclass(kw_only=True)
class Call:
    """The outputs of one HTTP request; changes in place.

    Attributes:
        id: Its name.
        outputs: Its outputs, in the order of its answer: those of one prompt follow each other.
        created: When it was submitted, in seconds since 1970.
        error: The code of the error that ended it; None if none did.
        tickets: Those of its outputs; none where it asks for no tokens.
    """

    gateway: Gateway
    http: Request
    id: str
    request: ClientRequest
    outputs: list[OutputStream]
    created: int = field(default_factory=lambda: int(time.time()))
    error: str | None = None
    _began: float = field(default_factory=time.monotonic)
    tickets: list[Ticket] = field(default_factory=list)

    async def deltas(self) -> AsyncIterator[Delta]:
        """What comes, in the order in which it comes. Leaving early cancels the rest."""
        try:
            if len(self.tickets) == 1:
                # No task stands between a single output and its reader.
                async for update in self.tickets[0]:
                    if (delta := self.outputs[0].take(update)) is not None:
                        yield delta
            elif self.tickets:
                async for delta in merged(self.outputs, self.tickets):
                    yield delta
        except Exception as error:
            self.error = served(error).code
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Cancel what still runs."""
        for ticket in self.tickets:
            ticket.cancel()
        if self.id in self.gateway.running:
            self.gateway.running.discard(self.id)
            self._record()
            self.gateway.service.metrics.note_unread(sum(output.reader.failures for output in self.outputs))

    def _record(self) -> None:
        """Leave what the log says of the request, and make its span."""
        gateway, outputs, traces = self.gateway, self.outputs if self.tickets else [], self.gateway.traces
        with_text = gateway.settings.log_text or (traces is not None and traces.content)
        decode = gateway.service.tokenizer.decode
        usage = usage_of(outputs)
        record = RequestRecord(
            id=self.id,
            path=self.http.url.path,
            model=gateway.name,
            verifier=catalog.name_of(gateway.service.engine.parts.verifier),
            options=self.outputs[0].task.options,
            num_outputs=self.request.num_outputs,
            prompt_tokens=usage["prompt_tokens"],
            completion_tokens=usage["completion_tokens"],
            finish_reasons=[output.finish_reason for output in outputs],
            times=[output.times for output in outputs if output.times is not None],
            tallies=[output.tally for output in outputs],
            seconds=time.monotonic() - self._began,
            error=self.error,
            prompts=[decode(list(each.tokens)) for each in self.request.prompts] if with_text else (),
            texts=[None if each.output is None else each.output.text for each in outputs] if with_text else (),
        )
        self.http.scope["state"]["record"] = record.log_fields(with_text=gateway.settings.log_text)
        if traces is not None and self.tickets:
            traces.add(self.http.headers, record)


@dataclass
class Writer:
    """Makes the bytes of an answer of the deltas of a call. One class for each format. Changes in place.

    Attributes:
        pulse: What a stream sends when nothing else comes.
    """

    pulse = KEEP_ALIVE
    call: Call

    @property
    def gateway(self) -> Gateway:
        """What all routes share."""
        return self.call.gateway

    @property
    def format(self) -> AnswerFormat:
        """What the answer says besides its text."""
        return self.call.request.format

    def begin(self) -> list[bytes]:
        """The events before all deltas."""
        return []

    def add(self, delta: Delta) -> list[bytes]:
        """The events of a delta."""
        raise NotImplementedError

    def end(self) -> list[bytes]:
        """The events behind all deltas."""
        raise NotImplementedError

    def failed(self, error: Exception) -> list[bytes]:
        """The events that tell of an error behind the first one."""
        return [event(openai_error(served(error))), DONE]

    def take(self, delta: Delta) -> None:
        """Note a delta of an answer that comes at once."""
        self.add(delta)

    def whole(self) -> dict[str, Any]:
        """The answer at once, behind all deltas."""
        raise NotImplementedError

    async def stream(self) -> AsyncIterator[bytes]:
        """All events."""
        kept = self.call.request.kept is not None
        for piece in self.begin():
            yield piece
        async for delta in self.call.deltas():
            if kept:
                self.take(delta)
            for piece in self.add(delta):
                yield piece
        if kept:
            await self._keep(self.whole())
        for piece in self.end():
            yield piece

    async def answer(self) -> dict[str, Any]:
        """The answer at once."""
        async for delta in self.call.deltas():
            self.take(delta)
        answer = self.whole()
        await self._keep(answer)
        return answer

    async def _keep(self, answer: dict[str, Any]) -> None:
        """Add the answer to the log of answers."""
        log, kept, http = self.gateway.answers, self.call.request.kept, self.call.http
        if log is not None and kept is not None:
            await log.add(http.scope["state"]["request_id"], http.url.path, kept, answer)


@dataclass
class ChoicesWriter(Writer):
    """Writes an object of OpenAI's that holds choices, or its chunks. A class of it says what a choice is.

    Attributes:
        kinds: What the object and a chunk are called.
        prefix: The beginning of their ids.
    """

    kinds: ClassVar[tuple[str, str]]
    prefix: ClassVar[str]
    _forms: list[Form] = field(default_factory=list)

    def end(self) -> list[bytes]:
        """The numbers of tokens, if they are wanted, and the end."""
        if not self.format.usage:
            return [DONE]
        outputs = self.call.outputs
        sums = {"usage": usage_of(outputs), "metrics": metrics_of(self.gateway, outputs)}
        return [event(self._object(self.kinds[1], []) | sums), DONE]

    def _chunk(self, output: OutputStream, choice: dict[str, Any], *, ended: bool = False) -> bytes:
        """The event of a choice of an output."""
        chunk = self._object(self.kinds[1], [choice])
        if self.format.counts:
            chunk["usage"] = usage_so_far(output)
        if ended:
            chunk["system_fingerprint"] = self.gateway.fingerprint
        return event(chunk)

    def _answer(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The answer at once."""
        outputs = self.call.outputs
        return self._object(self.kinds[0], choices) | {
            "usage": usage_of(outputs),
            "system_fingerprint": self.gateway.fingerprint,
            "metrics": metrics_of(self.gateway, outputs),
        }

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{self.call.id}",
            "object": kind,
            "created": self.call.created,
            "model": self.gateway.name,
            "choices": choices,
        }


async def respond(
    gateway: Gateway, http: Request, request: ClientRequest, writer: Callable[[Call], Writer]
) -> Response:
    """Run a request and write its answer. If the client leaves before its end, the outputs are cancelled.

    Raises:
        ServeError, InputError: An output cannot be run, or there is no room.
    """
    name, state = request.name, http.scope["state"]
    named = name is not None and http.headers.get("x-request-id") is None
    id = gateway.unique(request_id(name) if named else state["request_id"])
    outputs = outputs_of(gateway, request, id, state["key"])
    call = Call(gateway=gateway, http=http, id=id, request=request, outputs=outputs)
    if request.most_tokens != 0:
        call.tickets = gateway.service.submit([output.task for output in outputs])
    gateway.running.add(id)
    written = writer(call)
    if request.format.stream:
        return EventStream(
            written.stream(),
            failed=written.failed,
            close=call.close,
            keep_alive=gateway.settings.keep_alive_seconds,
            patience=gateway.service.limits.slow_client_seconds,
            pulse=written.pulse,
        )
    try:
        return JsonResponse(await while_there(http, written.answer()))
    finally:
        call.close()


async def while_there(http: Request, answer: Awaitable[Result]) -> Result:
    """The answer. Raises ClientDisconnect, and cancels the work, as soon as the client leaves."""
    working = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(gone(http.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        await cancelled(working, leaving)


def outputs_of(gateway: Gateway, request: ClientRequest, id: str, owner: str | None) -> list[OutputStream]:
    """The outputs of a request, not queued yet.

    Args:
        owner: The key that the request came with.
    """
    service, parser, tools, outputs = gateway.service, gateway.parser, request.tools, list[OutputStream]()
    reads = request.chat and (bool(tools.forced) or parser.template is not None)
    forced = tools.forced[0].function.name if tools.named else bool(tools.forced) or None
    for place, prompt in enumerate(request.prompts):
        room = service.max_context - len(prompt.tokens)
        most = room if request.most_tokens is None else min(request.most_tokens, room)
        options = replace(request.options, max_new_tokens=most, min_tokens=min(request.options.min_tokens, most))
        inner = options.constraint
        if request.chat and inner is not None and not isinstance(inner, Grammar):
            ends = service.engine.ends(options)
            options = replace(options, constraint=behind_thinking(gateway, inner, ends, prompt))
        for k in range(request.num_outputs):
            task = OutputTask(
                id=f"{id}-{len(outputs)}",
                prompt=prompt.tokens,
                options=options if options.sampling is None else replace(options, sampling=nth(options.sampling, k)),
                speculation=request.speculation,
                owner=owner,
                deadline=request.came + service.limits.request_timeout,
            )
            reader = parser.reader(prompt.tokens, tools.listed, forced) if reads else None
            outputs.append(
                OutputStream(
                    index=len(outputs),
                    prompt=place,
                    task=task,
                    reader=reader or PlainReader(),
                    raw=_raw(gateway, request, task) if request.raw or reader is not None else None,
                    interval=request.format.interval,
                )
            )
    return outputs


def behind_thinking(gateway: Gateway, inner: Constraint, ends: frozenset[int], prompt: RequestPrompt) -> Constraint:
    """The constraint, to hold behind the reasoning where the model reasons.

    Args:
        ends: Tokens that end an output.
    """
    marks, tokenizer = gateway.parser.thinking, gateway.service.tokenizer
    if marks is None:
        return inner
    opens, closes = (tuple(tokenizer.encode(mark, add_special_tokens=False)) for mark in marks)
    width = gateway.service.engine.parts.target.vocab_size
    return BehindThinking(
        inner=inner,
        opens=opens[0] if len(opens) == 1 else None,
        closes=closes,
        inside=gateway.parser.reader(prompt.tokens, (), None).reasons,
        eos_ids=ends,
        num_words=-(-width // 32),
    )


def _raw(gateway: Gateway, request: ClientRequest, task: OutputTask) -> Ending:
    """The text of an output with special tokens. It ends where the engine ends the output."""
    service = gateway.service
    return Ending(
        service.tokenizer,
        service.engine.stops(task.options),
        include_stop=task.options.include_stop,
        min_tokens=task.options.min_tokens,
        hidden=frozenset[int]() if request.raw else gateway.parser.hidden,
    )
