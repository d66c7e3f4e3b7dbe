"""A server of the llama.cpp family as a driver: built from the sources of its binding, started with a mode's flags.

Only ids of tokens are asked, never texts. What the server tells of its own times is passed on.
"""

import http.client
import json
import os
import shutil
import socket
import subprocess
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from outrider.bench.engines.driver import AnswerTiming, Driver, DriverRequest, EngineOutput, Options, peak_resident
from outrider.bench.engines.environments import CannotMake, EnvironmentFolder, reason

SOURCES, BUILD = "llama", "server"
"""Where the folder of an environment has the sources of the binding, and the server that is built from them."""
SECONDS = 600.0
"""Seconds that an answer may take."""
DRAFT, DRAFT_TOKENS = "{draft}", "{draft_tokens}"
"""Stand in the flags of a mode for the draft model's file, and for the number of tokens of a draft."""


def cannot_tell(error: ValueError) -> bool:
    """Whether a server refused because a token is a part of a character, which its JSON cannot hold."""
    return "UTF-8" in str(error)


class ServerDriver(Driver):
    """A server in a process of its own, asked over HTTP on this machine.

    Args:
        server: The program.
        flags: What it is started with, by mode.

    Attributes:
        path: Where it is asked.
    """

    path = "/completion"

    def __init__(self, server: Path, flags: Mapping[str, Sequence[str]]) -> None:
        self.server, self.flags = server, flags

    def start(self, options: Options) -> None:
        """Start the server, and wait until its models are loaded.

        Raises:
            RuntimeError: It ends instead; with the last line of what it wrote that tells an error.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port: int = free.getsockname()[1]
        command = [str(self.server), "-m", os.path.abspath(options.target), "-t", str(options.threads)]
        command += ["--port", str(self._port), "-np", str(options.batch), "--cache-ram", "0"]
        command += ["-c", str(options.batch * options.context)]
        flags = self.flags[options.mode]
        draft = os.path.abspath(options.draft)
        named = (flag.format(draft=draft, draft_tokens=options.draft_tokens) for flag in flags)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (`stop` closes it)
        # Some servers write a log where they are started.
        self._place = tempfile.TemporaryDirectory()
        self._process = subprocess.Popen(
            [*command, *named], cwd=self._place.name, stdout=self._log, stderr=subprocess.STDOUT
        )
        self._sums, self._counting = Counter[str](), not options.mode.startswith("plain")
        while not self._healthy():
            if self._process.poll() is not None:
                self._log.seek(0)
                words = self._log.read().decode(errors="replace")
                self._close()
                raise RuntimeError(f"the server ended with exit status {self._process.returncode}: {reason(words)}")
            time.sleep(0.05)

    def ask(self, asked: DriverRequest) -> EngineOutput:
        """Decode the prompts of a run, all at once."""
        began = time.perf_counter()
        with ThreadPoolExecutor(len(asked.prompts)) as threads:
            answers = list(threads.map(lambda i: self._answer(asked, i), range(len(asked.prompts))))
        seconds = time.perf_counter() - began
        timings = [self.timing(answer["timings"], asked) for answer in answers]
        for each in timings if self._counting else ():
            # The forward of the prompt says the first token, and every other one what it accepts and one more.
            self._sums["drafts"] += each.num_tokens - 1 - each.accepted_tokens
            self._sums["draft_tokens"] += each.draft_tokens
            self._sums["accepted_tokens"] += each.accepted_tokens
        return EngineOutput(
            tokens=[self.tokens(answer)[: asked.new_tokens] for answer in answers],
            seconds=seconds,
            counts=dict(self._sums),
            timings=timings,
            memory=peak_resident(self._process.pid),
        )

    def stop(self) -> None:
        """End the server."""
        self._process.terminate()
        self._process.wait()
        self._close()

    def _close(self) -> None:
        """Drop what it wrote."""
        self._log.close()
        self._place.cleanup()

    def body(self, asked: DriverRequest, i: int) -> dict[str, Any]:
        """What the server is asked for the i-th prompt: drawn from all tokens, from a cold cache."""
        return {
            "prompt": asked.prompts[i],
            "n_predict": asked.new_tokens,
            "temperature": asked.temperature,
            "samplers": ["temperature"],
            "seed": 1000 * asked.seed + i,
            "ignore_eos": asked.ignore_eos,
            "cache_prompt": False,
            "return_tokens": True,
        }

    def tokens(self, answer: Mapping[str, Any]) -> list[int]:
        """The ids of an answer's tokens."""
        return list(answer["tokens"])

    def timing(self, timings: Mapping[str, Any], asked: DriverRequest) -> AnswerTiming:
        """What the server tells of an answer. Its last draft may reach beyond what was asked."""
        return AnswerTiming(
            num_tokens=min(timings["predicted_n"], asked.new_tokens),
            prompt_seconds=timings["prompt_ms"] / 1000,
            decode_seconds=timings["predicted_ms"] / 1000,
            draft_tokens=timings.get("draft_n", 0),
            accepted_tokens=timings.get("draft_n_accepted", 0),
        )

    def likeliest(self, prompt: Sequence[int], count: int) -> dict[int, float]:
        """Log-probabilities of the likeliest tokens behind a prompt, of which the server keeps what it has read."""
        asked = DriverRequest(prompts=[list(prompt)], new_tokens=1, temperature=0.0, seed=0)
        reading = {"n_predict": 1, "n_probs": count, "logprobs": count, "cache_prompt": True}
        [row] = self.rows(self.call("POST", self.path, self.body(asked, 0) | reading))
        return {each["id"]: each["logprob"] for each in row["top_logprobs"]}

    def rows(self, answer: Mapping[str, Any]) -> list[Any]:
        """What an answer tells of each token's probability."""
        return list(answer["completion_probabilities"])

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """What the server answers.

        Raises:
            ValueError: It refuses; in its own words.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=SECONDS)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        finally:
            connection.close()
        if response.status != 200:
            raise ValueError(text)
        return json.loads(text)

    def _answer(self, asked: DriverRequest, i: int) -> Any:
        return self.call("POST", self.path, self.body(asked, i))

    def _healthy(self) -> bool:
        """Whether the models are loaded: until then nobody listens, or an error is answered."""
        try:
            self.call("GET", "/health")
        except (OSError, ValueError):
            return False
        return True


def unpack(room: EnvironmentFolder, pin: str) -> None:
    """Fetch the sources of a binding, which hold those of the server."""
    fetched = room.place / "sources"
    room.pip("download", "--no-deps", "--no-binary", pin.partition("==")[0], "--dest", fetched, pin)
    [archive] = fetched.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        # Python before 3.11.4 has no filters.
        opened.extraction_filter = getattr(tarfile, "data_filter", None)
        opened.extractall(fetched)
    [folder] = (path for path in fetched.iterdir() if path.is_dir())
    folder.rename(room.place / SOURCES)


def built(room: EnvironmentFolder, sources: Path, *flags: str) -> Path:
    """The server of an environment, compiled for this machine unless it was.

    Args:
        sources: Those of the engine, within the binding's.
        flags: Of cmake, besides those that all servers need.

    Raises:
        CannotMake: There is no compiler, or it fails.
    """
    server = room.place / BUILD / "bin" / "llama-server"
    if not server.is_file():
        compiler()
        if shutil.which("cmake") is None:
            raise CannotMake("there is no cmake; install it")
        common = ["-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF"]
        room.run("cmake", "-S", sources, "-B", room.place / BUILD, *common, *flags)
        cores = len(os.sched_getaffinity(0))
        room.run("cmake", "--build", room.place / BUILD, "--target", "llama-server", "-j", str(cores))
    return server


def compiler() -> str:
    """A C++ compiler.

    Raises:
        CannotMake: There is none.
    """
    compilers = [name for name in ("c++", "g++", "clang++") if shutil.which(name)]
    if not compilers:
        raise CannotMake("there is no C++ compiler; install one (c++, g++ or clang++)")
    return compilers[0]
