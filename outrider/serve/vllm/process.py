"""vLLM's own server in a process: started, watched until it is ready, ended."""

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
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from outrider.core.inputs import InputError
from outrider.serve.client.remote import Remote, RemoteError
from outrider.serve.vllm.error_line import last_words
from outrider.serve.vllm.launch import Launch, check_request
from outrider.serve.vllm.python import VllmPython

PATIENCE = 1800.0
"""Seconds that vLLM may take to load and compile its models."""
LOOK = 0.2
"""Seconds between two looks at a process that starts."""
GRACE = 20.0
"""Seconds that it gets to end by itself."""
CLOSING = 1.0
"""Seconds until the end of its log is read."""
LINES = 2000
"""Lines of the end of its log in which errors are looked for."""
MODULE = "vllm.entrypoints.cli.main"


class VllmProcess:
    """vLLM's server in a process of its own, within `with`.

    Attributes:
        remote: The server.
        launch: How it was started.
        tell: Called with sentences on how far it is.

    Args:
        python: The Python that has it.
        launch: What it serves, and where.
        keys: The key that lets clients in, if there is one; None draws one, which nobody else knows.
        shows_log: Whether its log goes to standard error too.
        tell: As the attribute.
        patience: Seconds that it may take to become ready.

    Raises:
        InputError: There are several keys.
    """

    def __init__(
        self,
        python: VllmPython,
        launch: Launch,
        *,
        keys: tuple[str, ...] | None = None,
        shows_log: bool = False,
        tell: Callable[[str], None] = lambda sentence: None,
        patience: float = PATIENCE,
    ) -> None:
        if keys is not None and len(keys) > 1:
            raise InputError(f"vLLM takes one key, and {len(keys)} were given; give one --api-key")
        self.python, self.launch = python, launch
        self.tell, self._patience, self._shows_log = tell, patience, shows_log
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._before: Any = None
        self._log: deque[str] = deque(maxlen=LINES)
        self._port = launch.port or free_port()
        key = secrets.token_urlsafe(24) if keys is None else next(iter(keys), None)
        self.remote = Remote(url=url_of(launch.host, self._port), key=key)
        self._folder = Path(tempfile.mkdtemp(prefix="outrider-vllm-"))

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

    def check(self, fields: Mapping[str, Any]) -> None:
        """Raise InputError for fields of a request that this vLLM refuses, ignores or gets wrong."""
        check_request(fields, self.launch, self.python)

    def start(self) -> None:
        """Start the process. Raises InputError where it cannot be started."""
        environment = self.python.environment(self.launch.threads)
        # It writes its own logs in colours and bars where it likes; these are read line by line.
        environment |= {"VLLM_NO_USAGE_STATS": "1", "TQDM_DISABLE": "1", "NO_COLOR": "1"}
        environment |= {} if self.remote.key is None else {"VLLM_API_KEY": self.remote.key}
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
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
                errors="replace",
                # Its workers end with it, and an interrupt at the terminal is for us to pass on.
                start_new_session=True,
            )
        except OSError as error:
            raise InputError(f"{self.python.executable} cannot be started: {error.strerror}") from error
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

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

    def wait(self) -> int:
        """Wait until it ends, or a signal ends this program. Returns the exit status: 0 after a signal, else 1."""
        if self._process is not None:
            try:
                self._process.wait()
            except (KeyboardInterrupt, SystemExit):
                return 0
        self.tell(f"vLLM has ended: {self.last_words()}")
        return 1

    def last_words(self) -> str:
        """Why it ended, as its log has it."""
        if self._reader is not None and not self.alive:
            # Its workers may hold the log open for longer.
            self._reader.join(CLOSING)
        return last_words("".join(list(self._log)))

    def _read(self, log: TextIO) -> None:
        """Read its log to the end, in a thread, so that it never waits for a reader."""
        with log:
            for line in log:
                self._log.append(line)
                if self._shows_log and sys.stderr is not None:
                    print(line, end="", file=sys.stderr, flush=True)

    def stop(self) -> None:
        """End the process and those that it started. What they wrote is deleted."""
        if self._process is not None:
            for each, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, GRACE)):
                if self._process.poll() is not None:
                    break
                self._signal(each)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(seconds)
            # A worker may outlive the process that started it.
            self._signal(signal.SIGKILL)
            self._process = None
        if self._reader is not None:
            self._reader.join(CLOSING)
        if self._before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)
            self._before = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _signal(self, number: int) -> None:
        """Send a signal to the process and to all that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid if self._process is not None else -1, number)


def _end(number: int, frame: object) -> None:
    """End the program as a signal would, with what stands in `finally`."""
    sys.exit(128 + number)


def url_of(host: str, port: int) -> str:
    """Where this machine reaches a server that listens at an address.

    Example:
        >>> url_of("0.0.0.0", 8000), url_of("::1", 8000)
        ('http://127.0.0.1:8000', 'http://[::1]:8000')
    """
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


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
