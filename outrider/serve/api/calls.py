"""The outputs of one HTTP request: submitted together, read together, cancelled together."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request

from outrider import catalog
from outrider.core.inputs import InputError
from outrider.serve.api.errors import of_input
from outrider.serve.api.gateway import Gateway
from outrider.serve.api.outputs import OutputPart, OutputStream, usage_of
from outrider.serve.api.sse import gone
from outrider.serve.observe.traces import attributes_of, events_of, texts_of
from outrider.serve.run.service import Ticket

Result = TypeVar("Result")
Coming = asyncio.Queue[tuple[OutputStream, OutputPart] | Exception | None]


class ClientGone(Exception):
    """The client left before its answer."""


@dataclass(kw_only=True)
class Call:
    """The outputs of one HTTP request.

    Attributes:
        id: Its name.
        error: The code of the error that ended it; None if none did.
    """

    gateway: Gateway
    request: Request
    id: str
    choices: Sequence[OutputStream]
    error: str | None = None
    _began: float = field(default_factory=time.monotonic)
    _tickets: list[Ticket] = field(default_factory=list)

    @classmethod
    def submit(cls, gateway: Gateway, request: Request, id: str, choices: Sequence[OutputStream]) -> "Call":
        """Queue all outputs, or none. Raises ApiError if one cannot be run, or JobError if there is no room."""
        call = cls(gateway=gateway, request=request, id=id, choices=choices)
        try:
            call._tickets = gateway.service.submit([choice.job for choice in choices])
        except InputError as error:
            raise of_input(error) from None
        return call

    def parts(self) -> AsyncIterator[tuple[OutputStream, OutputPart]]:
        """What comes, in the order in which it comes. Leaving early cancels the rest."""
        return self._of_one(self.choices[0], self._tickets[0]) if len(self._tickets) == 1 else self._of_many()

    async def _of_many(self) -> AsyncIterator[tuple[OutputStream, OutputPart]]:
        # What the client has not read stays in the tickets, which watch over slow clients.
        coming: Coming = asyncio.Queue(maxsize=1)
        pumps = [
            asyncio.ensure_future(_pump(choice, ticket, coming))
            for choice, ticket in zip(self.choices, self._tickets, strict=True)
        ]
        left = len(pumps)
        try:
            while left:
                found = await coming.get()
                if isinstance(found, Exception):
                    raise self._failed(found)
                if found is None:
                    left -= 1
                else:
                    yield found
        finally:
            self.close()
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _of_one(self, choice: OutputStream, ticket: Ticket) -> AsyncIterator[tuple[OutputStream, OutputPart]]:
        """The parts of a single output: no task stands between the ticket and the reader."""
        try:
            async for event in ticket:
                yield choice, choice.take(event)
        except Exception as error:
            raise self._failed(error) from None
        finally:
            self.close()

    def _failed(self, error: Exception) -> Exception:
        """The error as a route raises it."""
        found = of_input(error) if isinstance(error, InputError) else error
        self.error = getattr(found, "code", "internal_error")
        return found

    async def finish(self) -> None:
        """Read everything."""
        async for _ in self.parts():
            pass

    def close(self) -> None:
        """Cancel what still runs."""
        for ticket in self._tickets:
            ticket.cancel()
        if self.id in self.gateway.running:
            self.gateway.running.discard(self.id)
            self._tell()
            self.gateway.counts["parse_failures"] += sum(choice.reader.failures for choice in self.choices)

    def _tell(self) -> None:
        """Leave what the log says of the request, and make its span."""
        gateway, request, settings = self.gateway, self.request, self.gateway.settings
        counts = usage_of(self.choices)
        told: dict[str, Any] = {
            "prompt_tokens": counts["prompt_tokens"],
            "completion_tokens": counts["completion_tokens"],
            "finish_reasons": [choice.finish_reason or "abort" for choice in self.choices],
        }
        if self.error is not None:
            told["error"] = self.error
        traced = gateway.traces is not None and gateway.traces.content
        texts = texts_of(self.choices, gateway.service.tokenizer) if settings.log_text or traced else None
        if settings.log_text and texts is not None:
            told |= {"prompts": texts.prompts, "outputs": texts.outputs}
        request.scope["state"]["told"] = told
        if gateway.traces is not None and self._tickets:
            verifier = catalog.name_of(gateway.service.engine.parts.verifier)
            attributes = attributes_of(self.id, request.url.path, gateway.name, verifier, self.choices)
            seconds = time.monotonic() - self._began
            events = events_of(texts) if traced and texts is not None else ()
            failed = self.error is not None
            gateway.traces.add(request.headers, attributes, seconds=seconds, failed=failed, events=events)


async def _pump(choice: OutputStream, ticket: Ticket, coming: Coming) -> None:
    """Pass on the events of one output; at its end None, at its failure the error."""
    try:
        async for event in ticket:
            await coming.put((choice, choice.take(event)))
        await coming.put(None)
    except Exception as error:
        await coming.put(error)


async def while_there(request: Request, answer: Awaitable[Result]) -> Result:
    """The answer. Raises ClientGone, and cancels the work, as soon as the client leaves."""
    working = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(gone(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
