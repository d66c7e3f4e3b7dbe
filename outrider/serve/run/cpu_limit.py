"""Work within a limit on its CPU time: a busy machine does not reach it, as it would a limit on seconds."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from outrider.serve.errors import ServeError

Made = TypeVar("Made")
LOOK = 0.01
"""Least seconds between two looks at a clock."""
MOST_LEFT = 4
"""Most threads that are left behind at once."""


class Overloaded(ServeError):
    """Too many threads still work on what nobody waits for."""

    def __init__(self) -> None:
        message = "the server still compiles grammars that were given up, and takes no other ones; try again later"
        super().__init__(503, message, retry_after=10.0)


class ThreadClock:
    """The CPU time of the thread that makes it, for other threads to read while that thread lives.

    Where a thread has no such clock (macOS, Windows), it is seconds.

    Example:
        >>> ThreadClock().seconds < 1
        True
    """

    def __init__(self) -> None:
        find = getattr(time, "pthread_getcpuclockid", None)
        self._clock: int | None = None if find is None else find(threading.get_ident())
        self._began = self._now()

    @property
    def seconds(self) -> float:
        """What the thread took since the clock was made."""
        return self._now() - self._began

    def _now(self) -> float:
        return time.monotonic() if self._clock is None else time.clock_gettime(self._clock)


class Lane:
    """A thread that works one thing after the other. The process may end while it works."""

    def __init__(self, name: str) -> None:
        self.idle = threading.Event()
        self.idle.set()
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, make: Callable[[], Made]) -> "Future[Made]":
        """Queue a function."""
        coming: Future[Made] = Future()
        self._work.put((coming, make))
        return coming

    def close(self) -> None:
        """Let the thread end when it has done what is queued."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            coming, make = work
            if not coming.set_running_or_notify_cancel():
                continue
            self.idle.clear()
            try:
                result = make()
            except BaseException as error:
                coming.set_exception(error)
            else:
                coming.set_result(result)
            self.idle.set()


class Limited:
    """One thread for work within a limit. Used on one event loop.

    A thread cannot be ended from outside. One whose work is beyond the limit is left behind, and another one takes its
    place, so that what is queued does not wait for it.

    Args:
        cpu_seconds: The limit.
        name: Of its threads.
    """

    def __init__(self, cpu_seconds: float, name: str) -> None:
        self._limit = cpu_seconds
        self._name = name
        self._lane = Lane(name)
        self._left: list[Lane] = []

    async def run(self, make: Callable[[], Made]) -> Made:
        """What a function returns. Time in the queue does not count.

        Raises:
            TimeoutError: The work took more than the limit.
            Overloaded: Too many threads were left behind and still work.
        """
        clocks: list[ThreadClock] = []

        def work() -> Made:
            clocks.append(ThreadClock())
            return make()

        lane = self._open()
        working = lane.submit(work)
        waiting = asyncio.wrap_future(working)
        try:
            while not waiting.done():
                if lane is not self._lane and working.cancel():
                    # The thread was left behind before it came to this.
                    lane = self._open()
                    working = lane.submit(work)
                    waiting = asyncio.wrap_future(working)
                left = self._limit - (clocks[0].seconds if clocks else 0.0)
                if left < 0:
                    self._leave(lane)
                    raise TimeoutError
                # A thread uses at most one second of its processor in a second.
                await asyncio.wait((waiting,), timeout=max(LOOK, left))
            return waiting.result()
        finally:
            waiting.cancel()

    def close(self) -> None:
        """End the thread when it has done what is queued."""
        self._lane.close()

    def _open(self) -> Lane:
        self._left = [lane for lane in self._left if not lane.idle.is_set()]
        if len(self._left) > MOST_LEFT:
            raise Overloaded
        return self._lane

    def _leave(self, lane: Lane) -> None:
        """Leave a thread behind."""
        if lane is self._lane:
            lane.close()
            self._left.append(lane)
            self._lane = Lane(self._name)
