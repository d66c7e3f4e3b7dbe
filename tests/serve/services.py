"""Services over small engines, and readers of their tickets."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from outrider.core.types import Sampling
from outrider.engine.engine import Engine
from outrider.engine.generation import Generation
from outrider.engine.output import Output, Update
from outrider.serve.errors import ServeError
from outrider.serve.run.outputs import OutputTask, Ticket
from outrider.serve.run.service import Service

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


def task(id: str, prompt: Sequence[int] = (3, 9, 4), most: int = 12, **options: object) -> OutputTask:
    """A greedy task; some options are those of `Generation`, the others those of `OutputTask`."""
    own = {name: options.pop(name) for name in list(options) if name in OutputTask.__dataclass_fields__}
    own.setdefault("options", Generation(max_new_tokens=most, sampling=GREEDY, **options))
    return OutputTask(id=id, prompt=tuple(prompt), **own)


@dataclass
class Read:
    """What a reader got: its updates, and the error or the output at the end."""

    updates: list[Update] = field(default_factory=list)
    error: ServeError | None = None

    @property
    def output(self) -> Output:
        assert self.updates, self.error
        assert self.updates[-1].output is not None
        return self.updates[-1].output

    @property
    def tokens(self) -> list[int]:
        return [token for update in self.updates for token in update.tokens]

    @property
    def text(self) -> str:
        return "".join(update.text for update in self.updates)


async def read(ticket: Ticket) -> Read:
    """Read a ticket to its end."""
    found = Read()
    try:
        async for update in ticket:
            found.updates.append(update)
    except ServeError as error:
        found.error = error
    return found


async def made(service: Service, *tasks: OutputTask) -> list[Read]:
    """What some tasks, submitted together, bring."""
    return list(await asyncio.gather(*map(read, service.submit(tasks))))


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something holds."""
    while not condition():
        await asyncio.sleep(0.002)
