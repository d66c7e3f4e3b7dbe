"""The one thread that calls the engine. Everything else leaves messages for it, and gets updates back once per step."""

import asyncio
import contextlib
import heapq
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from outrider.core.inputs import InputError
from outrider.core.types import Request
from outrider.drafters.protocol import Drafter
from outrider.engine.engine import Engine
from outrider.engine.output import Output, Update
from outrider.host.meanwhile import hand_over_by
from outrider.host.threads import release_threads
from outrider.serve.errors import EngineDead, ServeError, TimedOut
from outrider.serve.observe.metrics import ServerMetrics
from outrider.serve.run.outputs import Ticket
from outrider.serve.run.slots import QueueSlots

log = logging.getLogger("outrider.serve")
PAUSE = 0.5
"""Most seconds between two signs of life of an idle worker."""
REFRESH = 0.1
"""Seconds between two looks at how full the cache is."""


@dataclass(frozen=True, kw_only=True)
class _Message:
    """What the engine's thread is asked to do, and who hears the error if the thread has ended."""

    do: Callable[[], None]
    refuse: Callable[[ServeError], None]


class Worker:
    """Runs an engine in a thread of its own. Any thread may call the public methods.

    Attributes:
        heartbeat: When the thread last showed life, in seconds of `time.monotonic`.
        error: What ended the thread; None while it lives, or if it was asked to stop.

    Args:
        engine: The engine; nobody else may call it. Its `route` is set; the one before chooses for tasks that name no
            drafter.
        slots: The places in the queue, which the worker gives back.
        metrics: The numbers that it counts.
    """

    def __init__(self, engine: Engine, *, slots: QueueSlots, metrics: ServerMetrics) -> None:
        self.heartbeat = time.monotonic()
        self.error: BaseException | None = None
        self._engine = engine
        self._slots = slots
        self._metrics = metrics
        self._intake: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._tickets: dict[str, Ticket] = {}
        self._sizes: dict[str, int] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._out: list[tuple[Ticket, Update | ServeError]] = []
        self._stopped_by: ServeError | None = None
        self._ended_by: ServeError | None = None
        self._refreshed = 0.0
        self._handed_over = False
        self._unread: list[str] = []
        self._thread = threading.Thread(target=self._main, name="outrider-engine")
        self._usual = engine.route
        engine.route = self._route

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread. The calling thread computes no more."""
        release_threads()
        self.heartbeat = time.monotonic()
        self._thread.start()

    def add(self, tickets: Sequence[Ticket]) -> None:
        """Queue some requests."""
        self._post(partial(self._begin, tickets), partial(self._refuse, tickets))

    def cancel(self, id: str) -> None:
        """End a request; nothing happens where it has ended."""
        self._post(partial(self._cancel, id))

    def call(self, function: Callable[[], Any]) -> "Future[Any]":
        """Call a function between two steps, in the thread of the engine."""
        future: Future[Any] = Future()
        self._post(partial(self._call, function, future), future.set_exception)
        return future

    def stop(self, error: ServeError) -> None:
        """End the thread. Requests that still run are cancelled and get this error."""
        self._post(partial(self._stop, error))

    def join(self) -> None:
        """Wait until the thread has ended."""
        if self._thread.ident is not None:
            self._thread.join()

    def _post(self, do: Callable[[], None], refuse: Callable[[ServeError], None] = lambda error: None) -> None:
        """Leave a message for the thread.

        Args:
            refuse: Called instead with the error of the thread's end, if it has ended.
        """
        self._intake.put(_Message(do=do, refuse=refuse))
        if self._ended_by is not None:
            self._refuse_messages()

    def _main(self) -> None:
        """The thread: messages, deadlines, a step, updates; again and again."""
        error: ServeError = EngineDead(status=500)
        try:
            hand_over_by(self._hand_over)
            while (stopped := self._take_messages()) is None:
                self._cancel_late()
                self._handed_over = False
                if self._engine.busy:
                    self._step()
                # Otherwise the next step hands the updates over when its first forward begins.
                if not (self._engine.busy and self._handed_over):
                    self._deliver()
                self._cancel_unread()
                self.heartbeat = time.monotonic()
            error = stopped
            for id in list(self._tickets):
                self._cancel(id, error)
            self._engine.rest()
        except BaseException as cause:
            self.error = cause
            log.critical("the engine has stopped by an error", exc_info=cause)
        finally:
            self._out += [(ticket, error) for ticket in self._tickets.values()]
            for id in list(self._tickets):
                self._forget(id)
            self._deliver()
            self._ended_by = EngineDead() if self.error is not None else error
            self._refuse_messages()

    def _take_messages(self) -> ServeError | None:
        """Do what messages ask for. An idle worker waits a little for the first one. Returns the error of a stop."""
        wait = not self._engine.busy
        with contextlib.suppress(queue.Empty):
            while self._stopped_by is None:
                self._intake.get(block=wait, timeout=PAUSE if wait else None).do()
                wait = False
        return self._stopped_by

    def _begin(self, tickets: Sequence[Ticket]) -> None:
        """Queue requests in the engine."""
        for ticket in tickets:
            id = ticket.id
            self._tickets[id], self._sizes[id] = ticket, len(ticket.request.prompt)
            try:
                self._engine.add(ticket.request)
            except InputError as error:
                self._out.append((ticket, ServeError(400, str(error))))
                self._forget(id)
            else:
                heapq.heappush(self._deadlines, (ticket.deadline, id))

    def _refuse(self, tickets: Sequence[Ticket], error: ServeError) -> None:
        """Tell requests that came too late."""
        for ticket in tickets:
            self._slots.leave(ticket.id)
            with contextlib.suppress(RuntimeError):
                ticket.loop.call_soon_threadsafe(Ticket.put, [(ticket, error)])

    def _call(self, function: Callable[[], Any], future: "Future[Any]") -> None:
        """Call a function for somebody who waits for its result."""
        # It may take long.
        self._deliver()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

    def _stop(self, error: ServeError) -> None:
        self._stopped_by = error

    def _route(self, request: Request) -> Drafter:
        """The drafter of a request, which the engine asks for when the request gets its slot."""
        self._slots.admit(request.id)
        ticket = self._tickets.get(request.id)
        if ticket is not None and ticket.drafter is not None:
            return ticket.drafter
        return self._engine.parts.drafter if self._usual is None else self._usual(request)

    def _cancel_late(self) -> None:
        """Cancel tasks whose deadline has passed."""
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, id = heapq.heappop(self._deadlines)
            if id in self._tickets and self._tickets[id].deadline == deadline:
                self._metrics.note_timeout()
                self._cancel(id, TimedOut())

    def _cancel(self, id: str, error: ServeError | None = None) -> None:
        """End a task now. Its reader gets the error, or else the output so far."""
        ticket = self._tickets.get(id)
        if ticket is None:
            return
        output = self._engine.cancel(id)
        if output is not None:
            self._metrics.note_end(output)
        if error is not None:
            self._out.append((ticket, error))
        elif output is not None:
            self._out.append((ticket, Update(id=id, tokens=[], text="", output=output)))
        self._forget(id)

    def _step(self) -> None:
        """One step of all requests."""
        began = time.perf_counter()
        updates = self._engine.step()
        now = time.perf_counter()
        self._metrics.note_updates(updates, now - began, self._sizes)
        if now - self._refreshed > REFRESH:
            self._refreshed = now
            self._metrics.note_cache(self._engine.num_cached_tokens / self._room)
        for update in updates:
            ticket = self._tickets.get(update.id)
            if ticket is None:
                continue
            output = update.output
            failed = output is not None and output.finish_reason == "error"
            self._out.append((ticket, _failure(output) if output is not None and failed else update))
            if output is not None:
                self._forget(update.id)

    @property
    def _room(self) -> int:
        """Tokens that the cache can hold."""
        engine = self._engine
        return (engine.max_slots + engine.max_warm_slots) * engine.parts.target.max_context

    def _forget(self, id: str) -> None:
        """Give back the place of a task."""
        self._tickets.pop(id, None)
        self._sizes.pop(id, None)
        self._slots.leave(id)

    def _hand_over(self) -> None:
        """Deliver the updates of the last step, while a forward of the next one runs. The event loop's work needs
        Python's lock, and so does all of a step but its forwards.
        """
        self._handed_over = True
        self._deliver()

    def _deliver(self) -> None:
        """Hand all updates to their event loops, one call for each loop. Those of a closed loop have no reader."""
        if not self._out:
            return
        loops: dict[asyncio.AbstractEventLoop, list[tuple[Ticket, Update | ServeError]]] = {}
        for ticket, update in self._out:
            loops.setdefault(ticket.loop, []).append((ticket, update))
        self._out = []
        for loop, updates in loops.items():
            try:
                loop.call_soon_threadsafe(Ticket.put, updates)
            except RuntimeError:
                self._unread += [ticket.id for ticket, _ in updates]

    def _cancel_unread(self) -> None:
        """Cancel tasks that have no reader."""
        unread, self._unread = self._unread, []
        for id in unread:
            self._cancel(id)

    def _refuse_messages(self) -> None:
        """Answer the messages that came too late."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._intake.get_nowait().refuse(self._ended_by or EngineDead())


def _failure(output: Output) -> ServeError:
    """What a client learns of a request that the engine ended by an error. The engine's own words stay in the log,
    because they may hold paths.
    """
    if isinstance(output.error, InputError):
        return ServeError(400, str(output.error))
    log.error("request %s failed", output.id, exc_info=output.error)
    kind = "error" if output.error is None else type(output.error).__name__
    return ServeError(500, f"request {output.id} failed with an internal error ({kind})")
