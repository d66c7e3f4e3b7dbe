"""What a command says on standard error while it works: bars on a terminal, elsewhere a line now and then."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from outrider.core.watcher import Watcher

PATIENCE = 4.0
"""Seconds without a word before a line says what is being done. It may come a second late, and five are too many."""
PERIOD = 30.0
"""Seconds after which a line says how far it is."""
DELAY = 1.0
"""Seconds before a bar appears: what ends sooner needs none."""
BEAT = 0.25
"""Seconds between two looks at the clock."""


class ProgressTask:
    """Something that takes a while; changes in place.

    Attributes:
        what: What is being done.
        total: How much there is to do; None where that is not known.
        unit: What is counted.
        done: How much of it is done.
        began: When it began, as `time.monotonic` has it.
    """

    def __init__(self, what: str, total: int | None, unit: str) -> None:
        self.what, self.total, self.unit, self.done, self.began = what, total, unit, 0, time.monotonic()

    def advance(self, count: int = 1) -> None:
        """Note that more is done."""
        self.done += count

    def reach(self, done: int, total: int | None = None) -> None:
        """Note how much is done, and how much there is to do if that is known only now."""
        self.done, self.total = done, self.total if total is None else total

    def line(self) -> str:
        """How far it is.

        Example:
            >>> reading = ProgressTask("reading the prompt", 20_000, "tokens")
            >>> reading.advance(4096)
            >>> reading.line()
            'reading the prompt, 4,096 of 20,000 tokens'
        """
        unit = f" {self.unit}" if self.unit else ""
        if self.total is not None:
            return f"{self.what}, {self.done:,} of {self.total:,}{unit}"
        return f"{self.what}, {self.done:,}{unit}" if self.done else self.what


class Display:
    """The tasks of a command, and a thread that shows them.

    On a terminal each task has a bar as long as it goes on. Elsewhere a line says what is being done when nothing was
    said for four seconds, and how far it is every thirty seconds.

    Args:
        terminal: Whether bars are shown.
        say: Prints a line.
        clock: Seconds that only go forwards.
        watcher: Says what goes on while the thread cannot run, because a library holds the interpreter.
    """

    def __init__(
        self,
        *,
        terminal: bool,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        watcher: Watcher | None = None,
    ) -> None:
        self.tasks: list[ProgressTask] = []
        self._terminal, self._say, self._clock, self._watcher = terminal, say, clock, watcher
        self._reported_at = clock()
        self._reported: ProgressTask | None = None
        self._bars: Any = None
        self._ids: dict[ProgressTask, Any] = {}
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin to show tasks."""
        self._thread.start()

    def stop(self) -> None:
        """Show nothing more."""
        self._ended.set()
        self._thread.join()
        if self._watcher is not None:
            self._watcher.stop()
        with self._lock:
            self._erase()

    def add(self, task: ProgressTask) -> None:
        """Show a task."""
        with self._lock:
            self.tasks.append(task)
            # The next call may hold the interpreter before anybody looks.
            if self._watcher is not None and self._watcher.runs:
                self._watcher.hear(task.line())

    def remove(self, task: ProgressTask) -> None:
        """Show a task no longer."""
        with self._lock:
            self.tasks.remove(task)
            if (id := self._ids.pop(task, None)) is not None:
                self._bars.remove_task(id)
            if not self._ids:
                self._erase()

    def look(self) -> None:
        """Show what is due now."""
        with self._lock:
            if self._terminal:
                self._draw()
            elif self.tasks:
                self._report()
            if self._watcher is not None:
                due = self.tasks and (self._watcher.runs or self._clock() - self.tasks[0].began >= DELAY)
                self._watcher.hear(self.tasks[-1].line() if due else "")

    def _report(self) -> None:
        newest, now = self.tasks[-1], self._clock()
        silent = now - self._reported_at
        if silent >= PERIOD or (silent >= PATIENCE and newest is not self._reported):
            self._reported_at, self._reported = now, newest
            text = "; ".join(task.line() for task in self.tasks)
            self._say(f"{text} ({now - self.tasks[0].began:.0f} s)")

    def _draw(self) -> None:
        now = self._clock()
        for task in self.tasks:
            if task not in self._ids and now - task.began >= DELAY:
                if self._bars is None:
                    self._bars = _bars()
                    self._bars.start()
                self._ids[task] = self._bars.add_task(task.what, total=task.total, unit=task.unit)
        for task, id in self._ids.items():
            self._bars.update(id, description=task.what, completed=task.done, total=task.total)

    def _erase(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
            self._ids.clear()

    def _run(self) -> None:
        while not self._ended.wait(BEAT):
            self.look()


_display: Display | None = None
"""There is one standard error, so at most one display."""


@contextmanager
def shown(what: str | None = None) -> Iterator[None]:
    """Show on standard error what goes on meanwhile. Without this, `task` only counts.

    Args:
        what: What the command does, for the time between its tasks; None says nothing then.
    """
    global _display
    if _display is not None:
        with task(what) if what is not None else _nothing():
            yield
        return
    error = sys.stderr
    terminal = error is not None and error.isatty()
    # A line of the watcher on a terminal is written over, so it may come every second.
    watcher = Watcher(terminal=terminal, patience=PATIENCE, period=1.0 if terminal else PERIOD)
    _display = Display(terminal=terminal, say=lambda line: print(line, file=error, flush=True), watcher=watcher)
    _display.start()
    try:
        with task(what) if what is not None else _nothing():
            yield
    finally:
        display, _display = _display, None
        display.stop()


def importing() -> AbstractContextManager[None]:
    """Show that libraries are imported. Torch and transformers take seconds."""
    return shown("loading the libraries")


@contextmanager
def task(what: str, total: int | None = None, unit: str = "") -> Iterator[ProgressTask]:
    """Something that takes a while; it is shown where a command shows such things (`shown`).

    Args:
        what: What is being done, as the beginning of a sentence.
        total: How much there is to do; None where that is not known.
        unit: What is counted.

    Example:
        >>> with task("reading the prompt", 3, "tokens") as reading:
        ...     reading.advance(2)
        >>> reading.done
        2
    """
    new_task, display = ProgressTask(what, total, unit), _display
    if display is not None:
        display.add(new_task)
    try:
        yield new_task
    finally:
        if display is not None:
            display.remove(new_task)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _bars() -> Any:
    """Bars on a terminal, which vanish at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        TimeElapsedColumn(),
    )
    # Lines that are printed on the same terminal stand above the bars. Other outputs must not pass through them.
    together = sys.stdout is not None and sys.stdout.isatty()
    return Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=together)
