"""The other engines of a measurement: which are here, what starts them, and whether they say what the target says."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.bench.engines import economize, flashspec, ik_llama, llama, openvino, vllm
from outrider.bench.engines.agreement import Surprise, agreement, surprise
from outrider.bench.engines.driver import DriverRequest, Options
from outrider.bench.engines.engine import DRAFT_MODEL, PeerEngine, converted
from outrider.bench.engines.environments import CannotMake, EnvironmentFolder
from outrider.bench.engines.process import Process, Refused, Stopped
from outrider.bench.side_by_side.ways import BatchWay, driver_way, transformers_way
from outrider.core.inputs import InputError, unknown
from outrider.core.place import on_disk, place_of
from outrider.core.progress import task
from outrider.drafters.protocol import lm_of
from outrider.engine.engine import Engine
from outrider.engine.generation import Generation

TRANSFORMERS, ASSISTED = "transformers", "assisted"
"""transformers' own `generate` in this process: plain, and with its own speculation."""
OUTSIDE: Mapping[str, PeerEngine] = {
    "vllm": vllm.ENGINE,
    "llama": llama.ENGINE,
    "ik_llama": ik_llama.ENGINE,
    "openvino": openvino.ENGINE,
    **openvino.ROUNDED_ENGINES,
    "flashspec": flashspec.ENGINE,
    "economize": economize.ENGINE,
}
"""Engines in processes of their own."""
NEARLY = {"bfloat16": 0.5, "float32": 0.01}
"""By how much, in logits, the target may prefer its own token to an engine's, by what both compute in."""
NUM_COMPARED = 3
"""Prompts on which an engine's tokens are compared with the target's."""
MOST_SURPRISING = 8.0
"""By how many standard deviations drawn tokens may be more surprising than the target's own."""


def usual_folder() -> Path:
    """Where environments are made by default: in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider" / "peers"


@dataclass(frozen=True, kw_only=True)
class PeerOptions:
    """Which other engines take part.

    Attributes:
        names: Of `transformers`, `assisted`, `vllm`, `llama`, `ik_llama`, `openvino`, `openvino_int8`, `openvino_int4`,
            `flashspec`, `economize`.
        environments: Folder of their environments, and of models in their formats.
        target_folder: A checkpoint of the target, for engines that do not read its GGUF file. Its weights are others.
        draft_folder: The same of the draft model.
        pythons: A Python that has the engine, by the name of its environment and instead of it.
        servers: A server of the engine that somebody built, likewise.
        make: Whether missing environments are made; each takes minutes and gigabytes.
        draft_tokens: Most tokens of their drafts.
        ngram: Longest run of tokens that they look for in the text before, where that is not their own choice.
        num_compared: Prompts on which their greedy tokens are compared with the target's.
        ways: The ways to decode that take part, of engines in processes of their own: `plain`, or `llama:plain` of one
            engine. None takes all.
    """

    names: tuple[str, ...] = (TRANSFORMERS,)
    environments: Path = field(default_factory=usual_folder)
    target_folder: Path | None = None
    draft_folder: Path | None = None
    pythons: Mapping[str, Path] = field(default_factory=dict)
    servers: Mapping[str, Path] = field(default_factory=dict)
    make: bool = False
    draft_tokens: int = 5
    ngram: int = 3
    num_compared: int = NUM_COMPARED
    ways: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in (TRANSFORMERS, ASSISTED, *OUTSIDE):
                raise unknown("peer", name, (TRANSFORMERS, ASSISTED, *OUTSIDE))
        known = [(name, mode) for name in self.outside for mode in OUTSIDE[name].modes]
        if self.ways is not None and not known:
            raise InputError(f"--peer-ways chooses among the ways of {', '.join(OUTSIDE)}; name some with --peers")
        for way in self.ways or ():
            if not any(way in (mode, f"{name}:{mode}") for name, mode in known):
                raise unknown("way of the peers", way, dict.fromkeys(mode for _, mode in known))
        for name, python in self.pythons.items():
            if not python.is_file():
                raise InputError(f"--{name}-python must name a Python that has {OUTSIDE[name].title}, got {python}")
        for name, server in self.servers.items():
            if not server.is_file():
                option = f"--{name.replace('_', '-')}-server"
                raise InputError(f"{option} must name the llama-server of {OUTSIDE[name].title}, got {server}")
        for option, place in (("--peer-target", self.target_folder), ("--peer-draft", self.draft_folder)):
            if place is not None and not (place / "config.json").is_file():
                raise InputError(f"{option} must name the folder of a checkpoint, got {place}")

    @property
    def outside(self) -> list[str]:
        """Those in processes of their own."""
        return [name for name in self.names if name in OUTSIDE]

    @property
    def ignore_eos(self) -> bool:
        """Whether an engine takes part whose answers cannot end at end tokens."""
        return any(not OUTSIDE[name].is_server for name in self.outside)


@dataclass(kw_only=True)
class Peers:
    """The other engines that take part, and why others do not; use it within `with`.

    Args:
        engine: Whose target they run.
        greedy: Token ids of a few prompts, for the comparison of tokens.
        new_tokens: Tokens of an answer.
        batch: Most prompts at once.
        threads: Threads of each.
        revision: Branch, tag or commit of the target's hub id.

    Attributes:
        left_out: What is left out, and why, in a sentence each.
        passed: What was compared of each way, in a sentence.
        starts: Seconds that the process of each way took until its models were loaded.
    """

    options: PeerOptions
    engine: Engine
    generation: Generation
    greedy: Sequence[list[int]]
    new_tokens: int
    batch: int
    threads: int
    revision: str | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    passed: dict[str, str] = field(default_factory=dict)
    starts: dict[str, float] = field(default_factory=dict)
    _running: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> "Peers":
        return self

    def __exit__(self, *error: object) -> None:
        self._running.close()

    def ways(self) -> list[BatchWay]:
        """Start the engines, and compare their tokens with the target's."""
        ways = []
        if TRANSFORMERS in self.options.names:
            ways.append(transformers_way(TRANSFORMERS, self.engine, self.generation))
        if ASSISTED in self.options.names:
            ways += self._assisted()
        for name in self.options.outside:
            ways += self._outside(name)
        return ways

    def _assisted(self) -> list[BatchWay]:
        """transformers' own speculation: prompt lookup, and assisted generation with the draft model."""
        engine, generation, drafted = self.engine, self.generation, self.options.draft_tokens
        ways = [transformers_way(f"{TRANSFORMERS}, prompt lookup", engine, generation, lookup=drafted)]
        name, assistant = f"{TRANSFORMERS}, assisted", draft_model_of(engine)
        if assistant is None:
            self.left_out[name] = "the setup has no draft model"
            return ways
        return [*ways, transformers_way(name, engine, generation, assistant=assistant, draft=drafted)]

    def _outside(self, name: str) -> list[BatchWay]:
        """An engine in all its modes, each in a process of its own."""
        other = OUTSIDE[name]
        try:
            room = self._room(other)
            target, draft, same = self._models(other, room)
        except CannotMake as error:
            self.left_out[other.title] = str(error)
            return []
        ways = []
        temperature = 1.0 if self.generation.sampling is None else self.generation.sampling.temperature
        plain: Sequence[list[int]] | None = None
        for mode in other.modes:
            if self.options.ways is not None and not {mode, f"{name}:{mode}"}.intersection(self.options.ways):
                continue
            title, drafts = f"{other.title}, {mode}", not mode.startswith("plain")
            if not drafts:
                plain = None
            if DRAFT_MODEL in mode and draft is None:
                self.left_out[title] = "the setup has no draft model"
                continue
            options = Options(
                mode=mode,
                target=str(target),
                draft=str(draft or target),
                dtype=self._dtype,
                threads=self.threads,
                draft_tokens=self.options.draft_tokens,
                ngram=self.options.ngram,
                batch=self.batch,
                context=self.engine.parts.target.max_context,
            )
            try:
                with ExitStack() as started:
                    process = started.enter_context(Process(other.command(room)))
                    process.start(options)
                    texts, gap = self._compare(process, other, title, same)
                    if same:
                        self._compare_drawn(process, other, temperature)
                    self._running.enter_context(started.pop_all())
            except (CannotMake, Stopped, Refused) as error:
                self.left_out[title] = str(error)
                continue
            whose = "are the target's" if same else "come from other weights than the target's"
            self.passed[title] = f"{len(texts)} greedy texts {whose}, up to gaps of {gap:.2g} logits"
            if drafts and plain is not None:
                changed = sum(text != alone for text, alone in zip(texts, plain, strict=True))
                self.passed[title] += f"; {changed} of them are not those of its own plain decoding"
            plain = plain if drafts else texts
            self.starts[title] = process.seconds
            ignore_eos = self.generation.ignore_eos
            ways.append(driver_way(title, self.engine, process, temperature, drafts=drafts, ignore_eos=ignore_eos))
        return ways

    @property
    def _dtype(self) -> str:
        return str(self.engine.parts.target.dtype).removeprefix("torch.")

    def _room(self, other: PeerEngine) -> EnvironmentFolder:
        """The environment of an engine. Raises CannotMake where there is none."""
        environment, folder = other.environment, self.options.environments
        if environment is None:
            raise CannotMake("it has no environment of its own")
        name = environment.name
        if name in self.options.servers:
            server = self.options.servers[name].absolute()
            return EnvironmentFolder(place=environment.room(folder).place, pins=(), other_server=server)
        if name in self.options.pythons:
            place = (folder / name).absolute()
            place.mkdir(parents=True, exist_ok=True)
            return EnvironmentFolder(place=place, pins=(), other_python=self.options.pythons[name].absolute())
        if not environment.is_made(folder) and not self.options.make:
            option = f"--{name.replace('_', '-')}-{'server' if other.is_server else 'python'}"
            named = f"its llama-server with {option}" if other.is_server else f"a Python that has it with {option}"
            raise CannotMake(f"it is not installed; name {named}, or let `--make-environments` install it")
        return environment.ready(folder)

    def _models(self, other: PeerEngine, room: EnvironmentFolder) -> tuple[Path, Path | None, bool]:
        """Target and draft model in the engine's format, and whether the target's weights are the same there.

        Raises:
            CannotMake: That is not possible.
        """
        if self._dtype not in NEARLY:
            raise CannotMake(f"it is compared in {' or '.join(NEARLY)}; the target computes in {self._dtype}")
        target: Any = self.engine.parts.target
        places: list[Path | None] = []
        same = other.weights is None
        drafting, options = draft_model_of(self.engine), self.options
        opened = (
            ("target", target.model, self.revision, options.target_folder),
            ("draft model", drafting, None, options.draft_folder),
        )
        for what, model, revision, instead in opened:
            if model is None:
                places.append(None)
                continue
            place = on_disk(place_of(str(model.name_or_path), revision=revision), revision)
            if instead is not None and place.is_file() and place.suffix != other.reads:
                place, same = instead, same and what != "target"
            if not place.is_file() and not any(place.glob("*.safetensors")):
                raise CannotMake(f"the {what} must be a GGUF file or a checkpoint with safetensors, got {place}")
            places.append(converted(other, room, place, options.environments, self._dtype))
        first, draft = places
        if first is None:
            raise CannotMake("there is no target")
        return first, draft, same

    def _compare(self, process: Process, other: PeerEngine, title: str, same: bool) -> tuple[list[list[int]], float]:
        """Greedy texts of an engine, and by how much the target prefers its own token to one of them at most.

        Args:
            same: Whether the engine has the target's own weights.

        Raises:
            CannotMake: It has, and takes tokens that the target finds clearly less likely.
        """
        target: Any = self.engine.parts.target
        texts, gaps = [], []
        prompts = self.greedy[: self.options.num_compared]
        with task(f"greedy texts of {title}", len(prompts), "texts") as bar:
            for prompt in prompts:
                texts.append(self._asked(process, other, prompt, 0.0))
                compared = agreement(target.model, prompt, texts[-1])
                if same and compared.gap > NEARLY[self._dtype]:
                    raise CannotMake(
                        f"it does not say what the target says: at temperature 0, token {compared.first} of an answer "
                        f"is {compared.gap:.2f} logits behind the target's own"
                    )
                gaps.append(compared.gap)
                bar.advance()
        return texts, max(gaps, default=0.0)

    def _asked(self, process: Process, other: PeerEngine, prompt: list[int], temperature: float) -> list[int]:
        """An answer that ends where the engine can end."""
        request = DriverRequest(
            prompts=[prompt],
            new_tokens=self.new_tokens,
            temperature=temperature,
            seed=0,
            ignore_eos=not other.is_server,
        )
        [tokens] = process.ask(request).tokens
        return tokens

    def _compare_drawn(self, process: Process, other: PeerEngine, temperature: float) -> None:
        """Raise CannotMake where tokens that an engine draws are far more surprising than the target's own."""
        if temperature == 0:
            return
        target: Any = self.engine.parts.target
        total = Surprise(excess=0.0, variance=0.0)
        for prompt in self.greedy[:NUM_COMPARED]:
            total += surprise(target.model, prompt, self._asked(process, other, prompt, temperature), temperature)
        if total.deviations > MOST_SURPRISING:
            raise CannotMake(
                f"it does not draw what the target draws: at temperature {temperature:g} its tokens are "
                f"{total.deviations:.0f} standard deviations more surprising than the target's own"
            )


def draft_model_of(engine: Engine) -> Any:
    """The draft model of an engine as transformers has it; None where its drafter is something else."""
    return getattr(lm_of(engine.parts.drafter), "model", None)
