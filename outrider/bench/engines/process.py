"""A driver in a process of its own."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any

from outrider.bench.engines.driver import Driver, DriverRequest, EngineOutput, Options

START = 900.0
"""Seconds that a driver may take to load its models: some engines compile them."""
ANSWER = 600.0
"""Seconds that one run may take."""


class Stopped(Exception):
    """Why a driver answers no more, in one sentence."""


class Refused(Exception):
    """Why an engine does not do a run, in its own words."""


class Process(Driver):
    """A driver's process, within `with`.

    Args:
        command: What starts it; the options are added.
        patience: Seconds that it may take to load its models.

    Attributes:
        seconds: How long it took until its models were loaded; 0 before.
    """

    def __init__(self, command: Sequence[str], *, patience: float = START) -> None:
        self.command, self.patience, self.seconds = command, patience, 0.0
        self._running = False

    def __enter__(self) -> "Process":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, options: Options) -> None:
        """Start the process. Raises Stopped if it ends, or does not become ready."""
        variables = {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        began = time.perf_counter()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (`stop` closes it)
        try:
            self._process = subprocess.Popen(
                [*self.command, json.dumps(asdict(options))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env=inherited | variables,
                start_new_session=True,
            )
        except OSError as error:
            self._errors.close()
            raise Stopped(f"it cannot be started: {error.strerror}") from error
        if self._process.stdin is None or self._process.stdout is None:
            raise Stopped("it has no standard input and output")
        self._running, self._input, self._output = True, self._process.stdin, self._process.stdout
        self._lines: queue.Queue[str] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        try:
            self._hear(self.patience)
        except Stopped:
            self.stop()
            raise
        self.seconds = time.perf_counter() - began

    def ask(self, asked: DriverRequest) -> EngineOutput:
        """The tokens and the seconds of a run.

        Raises:
            Refused: The engine does not do this run; the driver goes on.
            Stopped: The driver ended.
        """
        # A broken pipe is a driver that ended, which the next line tells.
        with contextlib.suppress(BrokenPipeError):
            self._input.write(json.dumps(asdict(asked)) + "\n")
            self._input.flush()
        heard = self._hear(ANSWER)
        if "refused" in heard:
            raise Refused(" ".join(str(heard["refused"]).split())[:300])
        return EngineOutput.read(heard)

    def stop(self) -> None:
        """End the process: it ends by itself when its input ends, or is killed, with all that it started."""
        if not self._running:
            return
        self._running = False
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._kill()
        self._listener.join()
        self._output.close()
        self._errors.close()

    def _listen(self) -> None:
        """Move the driver's lines into the queue; an empty one tells that there are no more."""
        for line in self._output:
            self._lines.put(line)
        self._lines.put("")

    def _hear(self, seconds: float) -> dict[str, Any]:
        """The next line."""
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            self._kill()
            raise Stopped(f"it gave no answer within {seconds:g} seconds; its last line: {self._last()}") from None
        if not line:
            raise Stopped(f"it ended with {ending(self._process.wait())}; its last line: {self._last()}")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def _kill(self) -> None:
        """End what is left of the process, and of what it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _last(self) -> str:
        """The last line of what it wrote as errors."""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 10_000))
        lines = self._errors.read().decode(errors="replace").split("\n")
        texts = [line.strip() for line in lines if line.strip()]
        return texts[-1][:300] if texts else "none"


def ending(status: int) -> str:
    """How a process ended.

    Example:
        >>> ending(1), ending(-4)
        ('exit status 1', 'SIGILL')
    """
    return f"exit status {status}" if status >= 0 else signal.Signals(-status).name
