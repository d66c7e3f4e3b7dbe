"""The driver's side of the conversation: JSON lines over standard input and output, with the standard library alone.

A driver is started with `Options` as its one argument, an object of JSON. When its models are loaded it writes
`{"ready": true}`. Then it reads one `Asked` per line. It answers with `{"tokens": [[...], ...], "seconds": 1.5}`, and
with `"counts": {...}` beside them if it counts something, or with `{"refused": "..."}` where its engine cannot do the
run. It ends when its input ends.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One run: prompts that are decoded together, each with exactly as many new tokens, past end tokens.

    Attributes:
        temperature: 0 takes the likeliest token. Every other temperature draws from all tokens.
    """

    prompts: list[list[int]]
    new_tokens: int
    temperature: float
    seed: int


Decode = Callable[[Asked], list[list[int]]]
"""Decodes the prompts of a run; returns the new tokens of each. One that has a method `counts` says how often something
happened so far, by name."""


def drive(load: Callable[[Options], Decode]) -> None:
    """Load an engine, then decode what is asked for until the input ends."""
    # Engines print what they like; it must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")

    decode = load(Options(**json.loads(sys.argv[1])))
    counts = getattr(decode, "counts", dict)
    say({"ready": True})
    for line in sys.stdin:
        asked = Asked(**json.loads(line))
        began = time.perf_counter()
        try:
            tokens = decode(asked)
        except Exception as error:
            say({"refused": f"{type(error).__name__}: {error}"})
        else:
            seconds = time.perf_counter() - began
            say({"tokens": tokens, "seconds": seconds, "counts": counts()})
