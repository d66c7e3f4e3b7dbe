"""The environments of the engines: a folder each, with pinned versions, made when it is missing.

A file in the folder holds the pins; other pins make the environment anew. `log.txt` beside it has the output of pip and
of compilers.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

MARK = "made.txt"
HERE = Path(sys.executable)
"""The Python of this process."""
PACKAGE = Path(__file__).parents[2]
BARE = f"""
import sys, types
for name in ("", ".bench", ".handoff"):
    sys.modules["outrider" + name] = types.ModuleType("outrider" + name)
    sys.modules["outrider" + name].__path__ = [{str(PACKAGE)!r} + name.replace(".", "/")]
"""
"""The beginning of a program in a Python that has no Outrider: it can import the files of this folder and the checks of
exports, and nothing that is installed beside Outrider.
"""
TORCH = "torch==2.13.0"
"""By itself and first: looser requirements would fetch other builds."""
TRANSFORMERS = "transformers==5.24.0"
"""For engines that decode with its models."""


class CannotMake(Exception):
    """Why an environment cannot be made here, in one sentence."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentFolder:
    """The folder of an environment.

    Attributes:
        pins: What is installed, with versions.
        other_python: A Python that somebody made, instead of one in the folder.
        other_server: A server that somebody built, instead of one in the folder.
    """

    place: Path
    pins: tuple[str, ...]
    other_python: Path | None = None
    other_server: Path | None = None

    @property
    def python(self) -> Path:
        """The environment's own Python."""
        return self.other_python or self.place / "venv" / "bin" / "python"

    def run(self, *command: str | Path) -> None:
        """Run a command, with what it says in the log.

        Raises:
            CannotMake: It cannot be run, or fails; with the last line that names an error.
        """
        words = [str(part) for part in command]
        try:
            done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        except OSError as error:
            raise CannotMake(f"{words[0]} cannot be run: {error.strerror}") from error
        with (self.place / "log.txt").open("a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(words)}\n{done.stdout}\n")
        if done.returncode:
            raise CannotMake(f"{Path(words[0]).name} says: {reason(done.stdout)}")

    def pip(self, *arguments: str | Path) -> None:
        """Run the environment's pip."""
        self.run(self.python, "-m", "pip", "--disable-pip-version-check", *arguments)

    def call(self, module: str, function: str, *arguments: str | Path, python: Path | None = None) -> None:
        """Call a function with texts, in a Python; by default the environment's."""
        program = f"from {module} import {function}; {function}(*sys.argv[1:])"
        self.run(python or self.python, "-c", BARE + program, *arguments)


def reason(output: str) -> str:
    """The last line of an output that tells an error; where none does, the last one before its help.

    Example:
        >>> reason("Collecting vllm\\nERROR: No matching distribution found for vllm\\n\\n")
        'No matching distribution found for vllm'
        >>> reason("unknown type\\nusage: server [options]\\n-o, --output FNAME")
        'unknown type'
        >>> reason("warning: old\\nusage: server [-o OUTPUT]\\nserver: error: unknown type")
        'server: error: unknown type'
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if line.lower().startswith(("error", "fatal")) or "error:" in line.lower()]
    before_help = list(takewhile(lambda line: not line.lower().startswith("usage:"), lines))
    last = (telling or before_help or lines or ["nothing"])[-1]
    return last.removeprefix("ERROR: ")[:300]


@dataclass(frozen=True, kw_only=True)
class Environment:
    """How the environment of an engine comes about.

    Attributes:
        pins: What is installed, with versions; the rest is what these require.
    """

    name: str
    pins: tuple[str, ...]
    make: Callable[[EnvironmentFolder], None]

    def room(self, folder: Path) -> EnvironmentFolder:
        """Where it is, or will be."""
        return EnvironmentFolder(place=(folder / self.name).absolute(), pins=self.pins)

    def is_made(self, folder: Path) -> bool:
        """Whether it is there, with these pins."""
        mark = self.room(folder).place / MARK
        return mark.is_file() and mark.read_text(encoding="utf-8").split() == list(self.pins)

    def ready(self, folder: Path) -> EnvironmentFolder:
        """The environment, which is made unless it is there.

        Raises:
            CannotMake: It cannot be made.
        """
        room = self.room(folder)
        if self.is_made(folder):
            return room
        try:
            shutil.rmtree(room.place, ignore_errors=True)
            room.place.mkdir(parents=True)
        except OSError as error:
            raise CannotMake(f"{room.place.name} cannot be written: {error.strerror}") from error
        room.run(sys.executable, "-m", "venv", room.place / "venv")
        self.make(room)
        (room.place / MARK).write_text("\n".join(self.pins) + "\n", encoding="utf-8")
        return room


def installed(room: EnvironmentFolder) -> None:
    """Make an environment of what pip finds for its pins."""
    room.pip("install", *room.pins)
