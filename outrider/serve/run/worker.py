"""The one thread that calls the engine. Everything else leaves messages for it, and gets events back once per step."""

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
from typing import Any

from outrider.core.inputs import InputError
from outrider.core.types import Request
from outrider.drafters.protocol import Drafter
from outrider.engine.engine import Engine
from outrider.engine.output import Output, Update
from outrider.host.meanwhile import hand_over_by
from outrider.host.threads import release_threads
from outrider.serve.failures import EngineDead, JobError, TimedOut, of_request
from outrider.serve.observe.watch import ServerStats
from outrider.serve.run.job import StepOutput
from outrider.serve.run.slots import QueueSlots
from outrider.serve.run.ticket import Ticket

log = logging.getLogger("outrider.serve")
PAUSE = 0.5
"""Most seconds between two signs of life of an idle worker."""
REFRESH = 0.1
"""Seconds between two looks at how full the cache is."""


@dataclass(frozen=True, kw_only=True)
class RunningTask:
    """A job that the worker makes.

    Attributes:
        ticket: Where its events go.
        request: What the engine gets.
        deadline: Seconds of `time.monotonic` after which it is cancelled.
        drafter: Its drafter; None: that of the engine's parts.
        stop_ids: Tokens that the client asked to stop at.
    """

    ticket: Ticket
    request: Request
    deadline: float
    drafter: Drafter | None
    stop_ids: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class _Add:
    runs: Sequence[RunningTask]


@dataclass(frozen=True, kw_only=True)
class _Cancel:
    id: str


@dataclass(frozen=True, kw_only=True)
class _Call:
    function: Callable[[], Any]
    future: Future[Any]


@dataclass(frozen=True, kw_only=True)
class _Stop:
    error: JobError


_Message = _Add | _Cancel | _Call | _Stop


class Worker:
    """Runs an engine in a thread of its own. Any thread may call the public methods.

    Attributes:
        heartbeat: When the thread last showed life, in seconds of `time.monotonic`.
        error: What ended the thread; None while it lives, or if it was asked to stop.

    Args:
        engine: The engine; nobody else may call it. Its `route` is set; the one before chooses for jobs that name no
            drafter.
        places: The places in the queue, which the worker gives back.
        watch: The numbers that it counts.
    """

    def __init__(self, engine: Engine, *, places: QueueSlots, watch: ServerStats) -> None:
        self.heartbeat = time.monotonic()
        self.error: BaseException | None = None
        self._engine = engine
        self._places = places
        self._watch = watch
        self._intake: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._runs: dict[str, RunningTask] = {}
        self._sizes: dict[str, int] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._out: list[tuple[Ticket, StepOutput | JobError]] = []
        self._ended_by: JobError | None = None
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

    def add(self, runs: Sequence[RunningTask]) -> None:
        """Make some jobs."""
        self._post(_Add(runs=runs))

    def cancel(self, id: str) -> None:
        """End a job; nothing happens where it has ended."""
        self._post(_Cancel(id=id))

    def call(self, function: Callable[[], Any]) -> "Future[Any]":
        """Call a function between two steps, in the thread of the engine."""
        future: Future[Any] = Future()
        self._post(_Call(function=function, future=future))
        return future

    def stop(self, error: JobError) -> None:
        """End the thread. Jobs that still run are cancelled and get this error."""
        self._post(_Stop(error=error))

    def join(self) -> None:
        """Wait until the thread has ended."""
        if self._thread.ident is not None:
            self._thread.join()

    def _post(self, message: _Message) -> None:
        self._intake.put(message)
        if self._ended_by is not None:
            self._refuse_messages()

    def _main(self) -> None:
        """The thread: messages, deadlines, a step, events; again and again."""
        error: JobError = EngineDead(status=500)
        try:
            hand_over_by(self._hand_over)
            while (stopped := self._take_messages()) is None:
                self._cancel_late()
                self._handed_over = False
                if self._engine.busy:
                    self._step()
                # Otherwise the next step hands the events over when its first forward begins.
                if not (self._engine.busy and self._handed_over):
                    self._deliver()
                self._cancel_unread()
                self.heartbeat = time.monotonic()
            error = stopped
            for id in list(self._runs):
                self._cancel(id, error)
            self._engine.rest()
        except BaseException as cause:
            self.error = cause
            log.critical("the engine has stopped by an error", exc_info=cause)
        finally:
            self._out += [(run.ticket, error) for run in self._runs.values()]
            for id in list(self._runs):
                self._forget(id)
            self._deliver()
            self._ended_by = EngineDead() if self.error is not None else error
            self._refuse_messages()

    def _take_messages(self) -> JobError | None:
        """Do what messages ask for. An idle worker waits a little for the first one. Returns the error of a stop."""
        wait = not self._engine.busy
        with contextlib.suppress(queue.Empty):
            while True:
                message = self._intake.get(block=wait, timeout=PAUSE if wait else None)
                wait = False
                if isinstance(message, _Stop):
                    return message.error
                self._handle(message)
        return None

    def _handle(self, message: "_Add | _Cancel | _Call") -> None:
        if isinstance(message, _Cancel):
            self._cancel(message.id)
        elif isinstance(message, _Call):
            # It may take long.
            self._deliver()
            _make(message)
        else:
            for run in message.runs:
                self._begin(run)

    def _begin(self, run: RunningTask) -> None:
        """Queue a job in the engine."""
        id = run.request.id
        self._runs[id], self._sizes[id] = run, len(run.request.prompt)
        try:
            self._engine.add(run.request)
        except InputError as error:
            self._out.append((run.ticket, _refusal(error)))
            self._forget(id)
        else:
            heapq.heappush(self._deadlines, (run.deadline, id))

    def _route(self, request: Request) -> Drafter:
        """The drafter of a request, which the engine asks for when the request gets its slot."""
        self._places.admit(request.id)
        run = self._runs.get(request.id)
        if run is not None and run.drafter is not None:
            return run.drafter
        return self._engine.parts.drafter if self._usual is None else self._usual(request)

    def _cancel_late(self) -> None:
        """Cancel jobs whose deadline has passed."""
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, id = heapq.heappop(self._deadlines)
            if id in self._runs and self._runs[id].deadline == deadline:
                self._watch.timeouts += 1
                self._cancel(id, TimedOut())

    def _cancel(self, id: str, error: JobError | None = None) -> None:
        """End a job now. Its reader gets the error, or else the output so far."""
        run = self._runs.get(id)
        if run is None:
            return
        output = self._engine.cancel(id)
        if output is not None:
            self._watch.note_end(output)
        if error is not None:
            self._out.append((run.ticket, error))
        elif output is not None:
            self._out.append((run.ticket, _event(run, Update(id=id, tokens=[], text="", output=output))))
        self._forget(id)

    def _step(self) -> None:
        """One step of all requests."""
        began = time.perf_counter()
        updates = self._engine.step()
        now = time.perf_counter()
        self._watch.note_updates(updates, now - began, self._sizes)
        if now - self._refreshed > REFRESH:
            self._refreshed = now
            self._watch.cache_use = self._engine.num_cached_tokens / self._room
        for update in updates:
            run = self._runs.get(update.id)
            if run is None:
                continue
            output = update.output
            if output is not None and output.finish_reason == "error":
                self._out.append((run.ticket, _failure(output)))
            else:
                self._out.append((run.ticket, _event(run, update)))
            if output is not None:
                self._forget(update.id)

    @property
    def _room(self) -> int:
        """Tokens that the cache can hold."""
        engine = self._engine
        return (engine.max_slots + engine.max_warm_slots) * engine.parts.target.max_context

    def _forget(self, id: str) -> None:
        """Give back the place of a job."""
        self._runs.pop(id, None)
        self._sizes.pop(id, None)
        self._places.leave(id)

    def _hand_over(self) -> None:
        """Deliver the events of the last step, while a forward of the next one runs. The event loop's work needs
        Python's lock, and so does all of a step but its forwards.
        """
        self._handed_over = True
        self._deliver()

    def _deliver(self) -> None:
        """Hand all events to their event loops, one call for each loop. Those of a closed loop have no reader."""
        if not self._out:
            return
        loops: dict[asyncio.AbstractEventLoop, list[tuple[Ticket, StepOutput | JobError]]] = {}
        for ticket, event in self._out:
            loops.setdefault(ticket.loop, []).append((ticket, event))
        self._out = []
        for loop, events in loops.items():
            try:
                loop.call_soon_threadsafe(_put, events)
            except RuntimeError:
                self._unread += [ticket.id for ticket, _ in events]

    def _cancel_unread(self) -> None:
        """Cancel jobs that have no reader."""
        unread, self._unread = self._unread, []
        for id in unread:
            self._cancel(id)

    def _refuse_messages(self) -> None:
        """Answer the messages that came too late."""
        error = self._ended_by or EngineDead()
        with contextlib.suppress(queue.Empty):
            while True:
                message = self._intake.get_nowait()
                if isinstance(message, _Call):
                    message.future.set_exception(error)
                elif isinstance(message, _Add):
                    for run in message.runs:
                        self._places.leave(run.request.id)
                        with contextlib.suppress(RuntimeError):
                            run.ticket.loop.call_soon_threadsafe(run.ticket.put, error)


def _put(events: Sequence[tuple[Ticket, StepOutput | JobError]]) -> None:
    """Give readers their events; on their event loop."""
    for ticket, event in events:
        ticket.put(event)


def _make(call: _Call) -> None:
    """Call a function for somebody who waits for its result."""
    if not call.future.set_running_or_notify_cancel():
        return
    try:
        call.future.set_result(call.function())
    except Exception as error:
        call.future.set_exception(error)


def _event(run: RunningTask, update: Update) -> StepOutput:
    times = update.times if update.output is None else update.output.times
    reason = None if update.output is None else update.output.stop_reason
    if isinstance(reason, int) and reason not in run.stop_ids:
        reason = None
    if times is None:
        raise RuntimeError(f"the engine gave no times for request {update.id}")
    return StepOutput(update=update, times=times, stop_reason=reason)


def _failure(output: Output) -> JobError:
    """What a client learns of a request that the engine ended by an error."""
    if isinstance(output.error, InputError):
        return _refusal(output.error)
    log.error("request %s failed", output.id, exc_info=output.error)
    return of_request(output.error, output.id)


def _refusal(error: InputError) -> JobError:
    return JobError(str(error), status=400, kind="invalid_request_error", code="invalid_value")
