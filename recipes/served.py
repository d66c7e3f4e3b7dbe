"""`outrider serve` as a process of its own, for the recipes that measure it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.core.inputs import InputError
from recipes.fresh import surroundings

READY = re.compile(r"serving .* at http://127\.0\.0\.1:(\d+) ")
"""What a server says when it listens."""
ENDING_SECONDS = 60
"""How long a server may take to end."""
VLLM_SECONDS = 900
"""How long vLLM may take to load and compile."""
NGRAM = {"method": "ngram", "prompt_lookup_max": 4, "num_speculative_tokens": 4}
VLLM_MODES: dict[str, tuple[str, ...]] = {"plain": (), "ngram": ("--speculative-config", json.dumps(NGRAM))}
"""Ways in which vLLM decodes, and the options of its server for them."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """A server that runs.

    Attributes:
        pid: Its process.
        port: Of the loopback address.
        told: Its last lines; grows.
    """

    pid: int
    port: int
    told: deque[str] = field(default_factory=deque, repr=False, compare=False)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> str:
        """What a path answers."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=60) as answer:
            found: bytes = answer.read()
        return found.decode()

    def load(self) -> int:
        """Number of requests that wait or run."""
        found: dict[str, Any] = json.loads(self.get("/load"))
        return int(found["server_load"])

    def metrics(self) -> dict[str, float]:
        """The samples of `/metrics`, by name and labels."""
        lines = [line for line in self.get("/metrics").splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def memory(self) -> int:
        """Resident memory in bytes. Raises InputError where the system does not tell."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError as error:
            raise InputError("memory is read from /proc, which this system lacks; run it on Linux") from error
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


@contextmanager
def served(options: Sequence[str], *, threads: int | None = None, killed: bool = False) -> Iterator[Served]:
    """A server with these options, for the time of the block. It ends by SIGTERM.

    Args:
        killed: Whether the block kills it.

    Raises:
        RuntimeError: It did not start, or its exit status is not 0.
    """
    command, around = [sys.executable, "-m", "outrider", "serve", "--port", "0", *options], surroundings(threads)
    with subprocess.Popen(command, env=around, stderr=subprocess.PIPE, text=True) as process:
        told = deque[str](maxlen=40)
        try:
            port = _port(process, told)
            # What nobody reads would stop the server when the pipe is full.
            reader = threading.Thread(target=told.extend, args=(process.stderr,), daemon=True)
            reader.start()
            yield Served(pid=process.pid, port=port, told=told)
            if not killed:
                process.send_signal(signal.SIGTERM)
            status = process.wait(timeout=ENDING_SECONDS)
            reader.join()
        finally:
            process.kill()
    if status and not killed:
        raise RuntimeError(f"the server ended with status {status}: {''.join(told)[-2000:]}")


@contextmanager
def vllm_served(python: Path, target: str, mode: str, *, dtype: str, slots: int, threads: int) -> Iterator[Served]:
    """vLLM's own server on this CPU, for the time of the block.

    Args:
        python: The Python of an environment that has vLLM.
        mode: One of `VLLM_MODES`.
        slots: Most requests at once.

    Raises:
        RuntimeError: It did not start.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cores = sorted(os.sched_getaffinity(0))[:threads]
    around = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    around |= {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "VLLM_NO_USAGE_STATS": "1"}
    around.pop("PYTHONPATH", None)
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", target, "--dtype", dtype]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-num-seqs", str(slots), *VLLM_MODES[mode]]
    with subprocess.Popen(command, env=around, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        told = deque[str](maxlen=40)
        reader = threading.Thread(target=told.extend, args=(process.stderr,), daemon=True)
        reader.start()
        try:
            server, end = Served(pid=process.pid, port=port, told=told), time.monotonic() + VLLM_SECONDS
            while not _is_healthy(server):
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"vLLM's server did not start: {''.join(told)[-2000:]}")
                time.sleep(1)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(timeout=ENDING_SECONDS)
            finally:
                process.kill()


def _is_healthy(server: Served) -> bool:
    try:
        server.get("/health")
    except (urllib.error.URLError, ConnectionError):
        return False
    return True


def _port(process: "subprocess.Popen[str]", told: deque[str]) -> int:
    """Wait until the server listens."""
    for line in process.stderr or ():
        told.append(line)
        if (found := READY.search(line)) is not None:
            return int(found[1])
    raise RuntimeError(f"the server did not start: {''.join(told)[-2000:]}")
