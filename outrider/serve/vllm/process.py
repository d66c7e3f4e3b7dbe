"""vLLM's process: started, watched until it is ready, asked, ended."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from outrider.core.inputs import InputError
from outrider.serve.client.remote import Remote, RemoteError
from outrider.serve.vllm.error_line import last_words
from outrider.serve.vllm.launch import Launch
from outrider.serve.vllm.python import VllmPython

PATIENCE = 1800.0
"""Seconds that vLLM may take to load and compile its models."""
LOOK = 0.2
"""Seconds between two looks at a process that starts."""
GRACE = 20.0
"""Seconds that it gets to end by itself."""
READ = 200_000
"""Bytes of the end of its log in which errors are looked for."""
MODULE = "vllm.entrypoints.cli.main"


class VllmProcess:
    """vLLM's server in a process of its own, within `with`. It listens on this machine alone, with a key of its own.

    Attributes:
        remote: The server.
        launch: How it was started.
        tell: Called with sentences on how far it is.

    Args:
        python: The Python that has it.
        launch: What it serves.
        tell: As the attribute.
        patience: Seconds that it may take to become ready.
    """

    def __init__(
        self,
        python: VllmPython,
        launch: Launch,
        *,
        tell: Callable[[str], None] = lambda sentence: None,
        patience: float = PATIENCE,
    ) -> None:
        self.python, self.launch = python, launch
        self.tell, self._patience = tell, patience
        self._process: subprocess.Popen[bytes] | None = None
        self._before: Any = None
        self._folder = Path(tempfile.mkdtemp(prefix="outrider-vllm-"))
        self._log = (self._folder / "log.txt").open("ab")
        key = secrets.token_urlsafe(24)
        self._port = free_port()
        self.remote = Remote(url=f"http://127.0.0.1:{self._port}", key=key)

    def __enter__(self) -> "VllmProcess":
        if threading.current_thread() is threading.main_thread():
            # A signal that ends this process must not leave vLLM behind.
            self._before = signal.signal(signal.SIGTERM, _end)
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def folder(self) -> Path:
        """A folder for files that vLLM shall read; it is deleted with the process."""
        return self._folder

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process. Raises InputError where it cannot be started."""
        environment = self.python.environment(self.launch.threads) | {"VLLM_API_KEY": self.remote.key or ""}
        # It writes its own logs in colours and bars where it likes; these are for a file.
        environment |= {"VLLM_NO_USAGE_STATS": "1", "TQDM_DISABLE": "1", "NO_COLOR": "1"}
        beside = self._folder / "beside"
        if self.python.package != "vllm":
            write_alias(beside, self.python)
        if self.launch.updates_weights:
            write_plugin(beside)
            environment["VLLM_SERVER_DEV_MODE"] = "1"
        if beside.exists():
            # All that vLLM's Python sees of ours.
            environment["PYTHONPATH"] = str(beside)
        command = [str(self.python.executable), "-m", MODULE, *self.launch.arguments(self._port)]
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                # Its workers end with it, and an interrupt at the terminal is for us to pass on.
                start_new_session=True,
            )
        except OSError as error:
            raise InputError(f"{self.python.executable} cannot be started: {error.strerror}") from error

    def wait_ready(self) -> None:
        """Return when it answers. Raises InputError if it ends, with its last real error, or takes too long."""
        began = time.monotonic()
        self.tell(f"vLLM {self.python.version} starts; loading and compiling may take minutes")
        while not self.answers():
            if not self.alive:
                raise InputError(f"vLLM did not start: {self.last_words()}")
            if time.monotonic() - began > self._patience:
                late = f"vLLM was not ready within {self._patience:g} seconds"
                raise InputError(f"{late}; its last line: {self.last_words()}")
            time.sleep(LOOK)
        self.tell(f"vLLM is ready after {time.monotonic() - began:.0f} s")

    def answers(self) -> bool:
        """Whether it takes requests."""
        try:
            Remote(url=self.remote.url, key=self.remote.key, timeout=5).text("/health")
        except RemoteError:
            return False
        return self.alive

    def last_words(self) -> str:
        """Why it ended, as its log has it."""
        self._log.flush()
        with (self._folder / "log.txt").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - READ))
            return last_words(file.read().decode(errors="replace"))

    def stop(self) -> None:
        """End the process and those that it started. What they wrote is deleted."""
        if self._process is not None:
            for each, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, GRACE)):
                if self._process.poll() is not None:
                    break
                self._signal(each)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(seconds)
            # A worker may outlive the process that started it.
            self._signal(signal.SIGKILL)
            self._process = None
        if self._before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)
            self._before = None
        if not self._log.closed:
            self._log.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _signal(self, number: int) -> None:
        """Send a signal to the process and to all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid if self._process is not None else -1, number)


def _end(number: int, frame: object) -> None:
    """End the program as a signal would, with what stands in `finally`."""
    sys.exit(128 + number)


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def write_alias(place: Path, python: VllmPython) -> None:
    """Let the build for CPUs, a package of another name, find itself under the name that its own command asks for."""
    write_package(place, "vllm", python.version if python.version.endswith("+cpu") else f"{python.version}+cpu")


def write_plugin(place: Path) -> None:
    """Write the plugin that lets vLLM read weights from files, as an installed package has it."""
    from outrider.serve.vllm import weight_files

    about = write_package(place, "outrider_weight_files", "1.0")
    shutil.copyfile(str(weight_files.__file__), place / "outrider_weight_files.py")
    (about / "entry_points.txt").write_text(
        "[vllm.general_plugins]\noutrider_weight_files = outrider_weight_files:register\n"
    )


def write_package(place: Path, name: str, version: str) -> Path:
    """Write what Python reads of an installed package. Returns the folder."""
    about = place / f"{name}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return about


def tell(sentence: str) -> None:
    """Print a sentence on standard error."""
    print(sentence, file=sys.stderr, flush=True)
