"""A process that says what a command does while a library holds its interpreter, so that no thread can."""

import os
import subprocess
import sys
from contextlib import suppress

LOOP = """
import os, select, sys, time
patience, period, terminal = float(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "True"
parent, line, heard, said = os.getppid(), "", time.monotonic(), 0.0

def suspended():
    try:
        with open(f"/proc/{parent}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False

while os.getppid() == parent:
    if select.select([0], [], [], min(0.5, patience / 2))[0]:
        read = os.read(0, 1 << 16).decode(errors="replace")
        if not read:
            break
        line, heard, said = read.splitlines()[-1], time.monotonic(), 0.0
        continue
    now = time.monotonic()
    if suspended():
        heard = now
    elif line and now - heard >= patience and now - said >= period:
        said = now
        text = f"{line}, {now - heard:.0f} s in one call of a library"
        os.write(2, (f"\\r\\x1b[2K{text}" if terminal else f"{text}\\n").encode())
"""
"""What the process does: it reads lines, and says the last one when no more come."""


class Watcher:
    """Tells standard error what goes on when nothing was heard for a while.

    Args:
        terminal: Whether standard error is a terminal. There one line is written over again.
        patience: Seconds in which nothing is heard.
        period: Seconds between two lines.
    """

    def __init__(self, *, terminal: bool, patience: float, period: float) -> None:
        self._arguments = (str(patience), str(period), str(terminal))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def runs(self) -> bool:
        """Whether there is a process that hears."""
        return self._process is not None

    def hear(self, line: str) -> None:
        """Note what goes on now; nothing if the line is empty."""
        with suppress(OSError):
            if self._process is None:
                if not line:
                    return
                # A process group of its own, because an interrupt is for the command.
                self._process = subprocess.Popen(
                    [sys.executable, "-S", "-E", "-c", LOOP, *self._arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    bufsize=0,
                    start_new_session=True,
                )
                assert self._process.stdin is not None
                os.set_blocking(self._process.stdin.fileno(), False)
            assert self._process.stdin is not None
            self._process.stdin.write(f"{line}\n".encode(errors="replace"))

    def stop(self) -> None:
        """Let the process end."""
        if self._process is not None:
            with suppress(OSError):
                assert self._process.stdin is not None
                self._process.stdin.close()
            self._process.terminate()
            self._process.wait()
            self._process = None
