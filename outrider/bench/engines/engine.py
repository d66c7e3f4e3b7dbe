"""What an engine is: modes, environment, what starts its driver, and what writes models in its format."""

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from outrider.bench.engines.environments import BARE, HERE, PACKAGE, CannotMake, Environment, EnvironmentFolder

DRAFT_MODEL, LOOKUP = "draft model", "prompt lookup"
Command = Callable[[EnvironmentFolder | None], list[str]]
"""The command that starts a driver, with the engine's environment or None for this one."""
Convert = Callable[[EnvironmentFolder, Path, Path, str], None]
"""Writes a model in the engine's format: environment, source, where to, dtype."""


@dataclass(frozen=True, kw_only=True)
class PeerEngine:
    """An engine behind a driver.

    Attributes:
        title: What tables call it.
        modes: Its ways to decode, as its driver knows them.
        environment: None is the one that this runs in.
        convert: None leaves models in the format of Hugging Face.
        plain: The mode that decodes plainly and starts fastest.
        digests_first: Whether the prompt's own forward says the first token, before there is a draft.
        is_server: Whether its driver asks a server, whose answers can end at end tokens.
        loads_heads: Whether it has modes for heads, by their names in the catalog.
        exports: Its name in `outrider export`.
        reads: The end of the names of files that hold a whole model and that it reads by itself; None reads none.
        weights: What it rounds weights to, which makes it another model; None keeps them.
    """

    title: str
    modes: tuple[str, ...]
    command: Command
    environment: Environment | None = None
    convert: Convert | None = None
    plain: str = "plain"
    digests_first: bool = False
    is_server: bool = False
    loads_heads: bool = False
    exports: str | None = None
    reads: str | None = None
    weights: str | None = None

    @property
    def version(self) -> str:
        """What is installed for it, and its version."""
        if self.environment is None:
            return "as here"
        return ", ".join(pin.replace("==", " ") for pin in self.environment.pins if not pin.startswith("torch"))


def python_driver(module: str) -> Command:
    """Starts a driver that is a module of this folder, in the environment's Python or in this one."""

    def command(room: EnvironmentFolder | None) -> list[str]:
        run = f"import runpy; runpy.run_module('{__package__}.{module}', run_name='__main__')"
        if room is None:
            return [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); {run}"]
        return [str(room.python), "-c", BARE + run]

    return command


def server_driver(module: str, built: Callable[[EnvironmentFolder], Path]) -> Command:
    """Starts a driver that is a module of this folder, with the server that it asks.

    Args:
        built: The server of an environment.
    """

    def command(room: EnvironmentFolder | None) -> list[str]:
        if room is None:
            raise CannotMake("its server has an environment of its own")
        server = room.other_server or built(room)
        run = f"import runpy; runpy.run_module('{__package__}.{module}', run_name='__main__')"
        return [str(HERE), "-c", BARE + run, str(server)]

    return command


def converted(engine: PeerEngine, room: EnvironmentFolder | None, source: Path, folder: Path, dtype: str) -> Path:
    """Where a model lies in the engine's format; it is converted unless it was.

    Args:
        source: A model's folder, or a file that the engine reads by itself.

    Raises:
        CannotMake: It cannot be converted.
    """
    if room is None or (source.is_file() and source.suffix == engine.reads):
        return source.absolute()
    if engine.convert is None:
        if engine.reads is not None:
            raise CannotMake(f"it reads {engine.reads} files alone; give target and draft model as such files")
        return source.absolute()
    if source.is_file():
        raise CannotMake(f"it reads no {source.suffix} files; name folders with --peer-target and --peer-draft")
    dtype = engine.weights or dtype
    place = folder.absolute() / "models" / f"{state_of(source)}-{room.place.name}-{dtype}"
    if not place.exists():
        # The environments of the engines read this file too, and have no Outrider.
        from outrider.core import files

        place.parent.mkdir(parents=True, exist_ok=True)
        with files.replaced(place) as fresh:
            engine.convert(room, source.absolute(), fresh, dtype)
    return place


def state_of(folder: Path) -> str:
    """Short, and another where a file of the folder was written since; contents, which may be large, are not read."""
    seen = sorted((each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in folder.iterdir())
    return hashlib.sha256(repr((str(folder.absolute()), seen)).encode()).hexdigest()[:12]
