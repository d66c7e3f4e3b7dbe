"""What drives an engine, and how a driver in a process of its own is talked to: JSON lines, the standard library alone.

The process is started with `Options` as its one argument, an object of JSON. When its models are loaded it writes
`{"ready": true}`. Then it reads one `DriverRequest` per line. It answers with `{"tokens": [[...], ...],
"seconds": 1.5}`, and with `"counts": {...}` beside them if it counts something, or with `{"refused": "..."}` where its
engine cannot do the run. It ends when its input ends.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a driver is started with.

    Attributes:
        mode: How to decode; each driver has its own names.
        target: Directory or file of the target, in the engine's own format.
        draft: The same of the draft model.
        dtype: What the models compute in: `bfloat16` or `float32`.
        draft_tokens: Tokens that one draft has at most.
        ngram: Longest run of tokens that is looked for in the text before.
        batch: Most prompts at once.
        context: Most tokens of a prompt and its output together.
        counts: Whether drafts are counted, where an engine counts them at a cost.
    """

    mode: str
    target: str
    draft: str
    dtype: str
    threads: int
    draft_tokens: int
    ngram: int
    batch: int
    context: int
    counts: bool = False


@dataclass(frozen=True, kw_only=True)
class DriverRequest:
    """One run: prompts that are decoded together, each with exactly as many new tokens, past end tokens.

    Attributes:
        temperature: 0 takes the likeliest token. Every other temperature draws from all tokens.
    """

    prompts: list[list[int]]
    new_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class EngineOutput:
    """What an engine decoded: the new tokens of each prompt.

    Attributes:
        seconds: How long it took; whoever asks the engine itself measures it.
        counts: How often something happened since the start, by name; empty where the engine counts nothing.
    """

    tokens: list[list[int]]
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)


class Driver:
    """What drives an engine: it is started once, asked for runs, and stopped. Each engine's file has one."""

    def start(self, options: Options) -> None:
        """Load the models."""
        raise NotImplementedError

    def ask(self, asked: DriverRequest) -> EngineOutput:
        """Decode the prompts of a run."""
        raise NotImplementedError

    def stop(self) -> None:
        """End what `start` began."""


def serve(driver: Driver) -> None:
    """Start a driver, and answer what comes over standard input until it ends."""
    # Engines print what they like; it must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")

    driver.start(Options(**json.loads(sys.argv[1])))
    say({"ready": True})
    for line in sys.stdin:
        asked = DriverRequest(**json.loads(line))
        began = time.perf_counter()
        try:
            answer = driver.ask(asked)
        except Exception as error:
            say({"refused": f"{type(error).__name__}: {error}"})
        else:
            say(asdict(replace(answer, seconds=time.perf_counter() - began)))
    driver.stop()
