"""What drives an engine, and how a driver in a process of its own is talked to: JSON lines, the standard library alone.

The process is started with `Options` as its one argument, an object of JSON. When its models are loaded it writes
`{"ready": true}`. Then it reads one `DriverRequest` per line. It answers with an `EngineOutput`, or with
`{"refused": "..."}` where its engine cannot do the run. It ends when its input ends.
"""

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
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
        ignore_eos: Whether answers go on past end tokens; engines that cannot end there always do.
        ids: Whether the ids of the answers' tokens are needed, where an engine tells them at a cost.
    """

    prompts: list[list[int]]
    new_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool = True
    ids: bool = True


@dataclass(frozen=True, kw_only=True)
class AnswerTiming:
    """What an engine tells of one answer.

    Attributes:
        num_tokens: Tokens that it decoded.
        prompt_seconds: From the beginning of the prompt to the first token.
        decode_seconds: From the first token to the last one.
        draft_tokens: Tokens that were drafted.
        accepted_tokens: Those of them that were accepted.
    """

    num_tokens: int
    prompt_seconds: float
    decode_seconds: float
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class EngineOutput:
    """What an engine decoded: the new tokens of each prompt.

    Attributes:
        seconds: How long it took; whoever asks the engine measures it where the driver does not.
        counts: How often something happened since the start, by name; empty where the engine counts nothing.
        timings: What is told of each answer; empty where the engine tells nothing.
        memory: Most bytes that the engine's process has held so far; None where the machine does not tell.
    """

    tokens: list[list[int]]
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    timings: list[AnswerTiming] = field(default_factory=list)
    memory: int | None = None

    @classmethod
    def read(cls, value: Mapping[str, Any]) -> "EngineOutput":
        """The output that was written as an object of JSON."""
        return cls(**{**value, "timings": [AnswerTiming(**each) for each in value.get("timings", ())]})


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

    driver.start(Options(**json.loads(sys.argv[-1])))
    say({"ready": True})
    for line in sys.stdin:
        asked = DriverRequest(**json.loads(line))
        began = time.perf_counter()
        try:
            answer = driver.ask(asked)
        except Exception as error:
            say({"refused": f"{type(error).__name__}: {error}"})
        else:
            seconds = answer.seconds or time.perf_counter() - began
            memory = peak_resident() if answer.memory is None else answer.memory
            say(asdict(replace(answer, seconds=seconds, memory=memory)))
    driver.stop()


def peak_resident(process: int | str = "self") -> int | None:
    """Most bytes that a process has held, files that it maps included; None where Linux does not tell."""
    with contextlib.suppress(OSError):
        match = re.search(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
        if match:
            return 1024 * int(match[1])
    return None
