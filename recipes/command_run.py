"""A command that is run once on a terminal, with its time, its memory and its silence."""

import os
import pty
import re
import select
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

LAST_LINES = 60
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
"""What moves the cursor of a terminal, and colours it."""


@dataclass(frozen=True, kw_only=True)
class CommandRun:
    """A command that was run once.

    Attributes:
        seconds: From its start to its end.
        memory: Largest resident memory of it and of the processes that it started, in bytes.
        silence: Longest time without any output, in seconds.
        said: Its last lines.
    """

    name: str
    model: str
    status: int
    seconds: float
    memory: int
    silence: float
    said: Sequence[str]


class Watched:
    """A command on a terminal of its own, whose output is read while it runs."""

    def __init__(self, command: Sequence[str | Path], *, typed: str = "", **environment: str) -> None:
        self.began = self.heard = time.monotonic()
        self.silence = 0.0
        self.output = bytearray()
        master, slave = pty.openpty()
        asks = subprocess.PIPE if typed else slave
        self.process = subprocess.Popen(
            [str(part) for part in command],
            stdin=asks,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "COLUMNS": "120", **environment},
            start_new_session=True,
        )
        os.close(slave)
        self.terminal = master
        if self.process.stdin is not None:
            self.process.stdin.write(typed.encode())
            self.process.stdin.close()

    def listen(self, seconds: float) -> bool:
        """Read for some seconds, or until it ends. Returns whether it still runs."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            ready, _, _ = select.select([self.terminal], [], [], min(left, 0.5))
            now = time.monotonic()
            self.silence = max(self.silence, now - self.heard)
            if not ready:
                continue
            try:
                read = os.read(self.terminal, 1 << 16)
            except OSError:
                # The end of a terminal whose programs have ended.
                return False
            if not read:
                return False
            self.heard = now
            self.output += read
        return True

    def ended(self, name: str, model: str) -> CommandRun:
        """What it was, after it has ended."""
        _, status, usage = os.wait4(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        os.close(self.terminal)
        text = CONTROL.sub("", self.output.decode(errors="replace")).replace("\r\n", "\n")
        lines = [line.rpartition("\r")[2].strip() for line in text.splitlines()]
        return CommandRun(
            name=name,
            model=model,
            status=self.process.returncode,
            seconds=time.monotonic() - self.began,
            memory=usage.ru_maxrss * 1024,
            silence=self.silence,
            said=[line for line in lines if line][-LAST_LINES:],
        )


def run(name: str, model: str, command: Sequence[str | Path], *, typed: str = "", limit: float) -> CommandRun:
    """Run a command to its end. After `limit` seconds it is stopped, which is a failure."""
    watched = Watched(command, typed=typed)
    if watched.listen(limit):
        os.killpg(watched.process.pid, signal.SIGKILL)
    return watched.ended(name, model)


def served(
    name: str, model: str, command: Sequence[str | Path], ask: Callable[[str], str], *, limit: float
) -> CommandRun:
    """Start a server, ask it when it is ready, and stop it. No answer is a failure."""
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    watched = Watched([*command, "--port", str(port)])
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + limit
    answer = ""
    while not answer and time.monotonic() < until and watched.listen(0.5):
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
        except OSError:
            continue
        answer = ask(url)
    # A server that waits is silent.
    silence = watched.silence
    # A process that was started in the background may ignore an interrupt.
    os.killpg(watched.process.pid, signal.SIGTERM)
    if watched.listen(30):
        os.killpg(watched.process.pid, signal.SIGKILL)
    ended = watched.ended(name, model)
    status = 0 if answer and ended.status in (0, 128 + signal.SIGTERM, -signal.SIGTERM) else ended.status or 1
    return CommandRun(**{**vars(ended), "status": status, "silence": silence, "said": [*ended.said, answer]})
