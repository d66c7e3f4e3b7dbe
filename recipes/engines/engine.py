"""The engines: their modes, environments and drivers, and what turns Hugging Face models into theirs."""

import hashlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from outrider.core import files
from recipes.engines.environments import ENVIRONMENTS, HERE, CannotMake, Environment, Room, compiler

DRAFT_MODEL = "draft model"
Start = Callable[[Room | None], list[str]]
"""The command that starts a driver, with the engine's environment or None for this one."""
Convert = Callable[[Room, Path, Path, str], None]
"""Writes a model in the engine's format: environment, source, where to, dtype."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine behind a driver.

    Attributes:
        title: What tables call it.
        modes: Its ways to decode, as its driver knows them.
        environment: None is the one that this runs in.
        convert: None leaves models in the format of Hugging Face.
    """

    title: str
    modes: tuple[str, ...]
    start: Start
    environment: Environment | None = None
    convert: Convert | None = None

    @property
    def version(self) -> str:
        """What is installed for it, and its version."""
        if self.environment is None:
            return "as here"
        return ", ".join(pin.replace("==", " ") for pin in self.environment.pins if not pin.startswith("torch"))


def python_driver(module: str) -> Start:
    """Starts a driver that is a module here."""

    def start(room: Room | None) -> list[str]:
        return [str(room.python if room else sys.executable), "-m", f"recipes.engines.{module}"]

    return start


def vllm_driver(room: Room | None) -> list[str]:
    """Starts the driver of vLLM with the OpenMP library that vLLM asks to be loaded first."""
    command = python_driver("vllm_driver")(room)
    found = sorted(room.place.glob("venv/lib/libiomp5.so")) if room else []
    return ["env", f"LD_PRELOAD={found[0]}", *command] if found else command


def llama_driver(room: Room | None) -> list[str]:
    """Starts the driver of llama.cpp, compiled before if its source is new."""
    if room is None:
        raise CannotMake("llama.cpp has an environment of its own")
    source = HERE / "llama_driver.cpp"
    driver = room.place / f"driver-{digest(source)}"
    if not driver.exists():
        below = room.place / "llama" / "vendor" / "llama.cpp"
        library = sorted(room.place.glob("venv/**/libllama-common.so"))[0]
        include = [f"-I{below / part}" for part in ("common", "include", "ggml/include", "vendor")]
        names = ["-lllama-common", "-lllama", "-lggml", "-lggml-base", "-lggml-cpu"]
        # An old tag, because the libraries find each other by the path of the program.
        link = [f"-L{library.parent}", *names, f"-Wl,--disable-new-dtags,-rpath,{library.parent}"]
        with files.replaced(driver) as fresh:
            room.run(compiler(), "-O3", "-march=native", "-std=c++17", *include, source, "-o", fresh, *link)
    return [str(driver)]


def convert_openvino(room: Room, source: Path, out: Path, dtype: str) -> None:
    """As a folder; the dtype is told to the driver instead."""
    room.run(room.python, "-m", "recipes.engines.openvino_model", source, out)


def convert_llama(room: Room, source: Path, out: Path, dtype: str) -> None:
    """As a file."""
    room.run(room.python, "-m", "recipes.engines.llama_model", source, out, dtype)


def converted(engine: Engine, room: Room | None, source: Path, folder: Path, dtype: str) -> Path:
    """Where a model lies in the engine's format; it is converted unless it was.

    Raises:
        CannotMake: It cannot be converted.
    """
    if engine.convert is None or room is None:
        return source.absolute()
    place = folder.absolute() / "models" / f"{digest(source / 'model.safetensors')}-{room.place.name}-{dtype}"
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        with files.replaced(place) as fresh:
            engine.convert(room, source.absolute(), fresh, dtype)
    return place


def digest(file: Path) -> str:
    """Short, and another for other contents."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12]


ENGINES: Mapping[str, Engine] = {
    "outrider": Engine(
        title="Outrider", modes=("plain", "suffix", DRAFT_MODEL), start=python_driver("outrider_driver")
    ),
    "transformers": Engine(
        title="transformers",
        modes=("plain", "prompt lookup", DRAFT_MODEL),
        start=python_driver("transformers_driver"),
    ),
    "vllm": Engine(
        title="vLLM",
        modes=("plain", "ngram", DRAFT_MODEL),
        start=vllm_driver,
        environment=ENVIRONMENTS["vllm"],
    ),
    "llama": Engine(
        title="llama.cpp",
        modes=("plain", "ngram", DRAFT_MODEL),
        start=llama_driver,
        environment=ENVIRONMENTS["llama"],
        convert=convert_llama,
    ),
    "openvino": Engine(
        title="OpenVINO GenAI",
        modes=("plain", "prompt lookup", DRAFT_MODEL),
        start=python_driver("openvino_driver"),
        environment=ENVIRONMENTS["openvino"],
        convert=convert_openvino,
    ),
}
