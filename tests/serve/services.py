"""Services over small engines, and readers of their tickets."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from outrider.core.types import Sampling
from outrider.engine.engine import Engine
from outrider.engine.generation import Generation
from outrider.engine.output import Output
from outrider.serve.run.job import OutputTask, StepOutput
from outrider.serve.run.service import JobError, Service, Ticket

GREEDY = Sampling(temperature=0, seed=0)


@contextmanager
def serving(engine: Engine, **options: object) -> Iterator[Service]:
    """A running service, which ends with the test."""
    service = Service(engine, names=("tiny",), **options)
    service.start()
    try:
        yield service
    finally:
        service.engine.between = None
        service.close()


def run(engine: Engine, work: Callable[[Service], Awaitable[object]], **options: object) -> object:
    """What a coroutine function makes of a running service."""
    with serving(engine, **options) as service:
        return asyncio.run(asyncio.wait_for(work(service), 60))


def job(id: str, prompt: Sequence[int] = (3, 9, 4), most: int = 12, **options: object) -> OutputTask:
    """A greedy job; some options are those of `Generation`, the others those of `OutputTask`."""
    own = {name: options.pop(name) for name in list(options) if name in OutputTask.__dataclass_fields__}
    own.setdefault("options", Generation(max_new_tokens=most, sampling=GREEDY, **options))
    return OutputTask(id=id, prompt=tuple(prompt), **own)


@dataclass
class Read:
    """What a reader got: its events, and the error or the output at the end."""

    events: list[StepOutput] = field(default_factory=list)
    error: JobError | None = None

    @property
    def output(self) -> Output:
        assert self.events, self.error
        assert self.events[-1].update.output is not None
        return self.events[-1].update.output

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events for token in event.update.tokens]

    @property
    def text(self) -> str:
        return "".join(event.update.text for event in self.events)


async def read(ticket: Ticket) -> Read:
    """Read a ticket to its end."""
    found = Read()
    try:
        async for event in ticket:
            found.events.append(event)
    except JobError as error:
        found.error = error
    return found


async def made(service: Service, *jobs: OutputTask) -> list[Read]:
    """What some jobs, submitted together, bring."""
    return list(await asyncio.gather(*map(read, service.submit(jobs))))


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something holds."""
    while not condition():
        await asyncio.sleep(0.002)
