"""The gate before any printed speedup: a lossless combination, and greedy identity of this very pair in float32."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from outrider import remembered
from outrider.drafters.protocol import Surroundings
from outrider.engine.engine import Engine
from outrider.lengths.experience import Experience
from outrider.lm.fingerprint import fingerprint, machine, source
from outrider.proof.identity import Difference, Identity, identity
from outrider.types import InputError

NUM_TOKENS = 32
PROMPTS = ("Once upon a time", "The answer to the question is", "def main(")
"""Three openings of texts."""
PACKAGE = Path(__file__).parent.parent


def gate(engine: Engine) -> Identity:
    """Check greedy identity of the engine's pair in float32, on 3 prompts x 32 tokens. The result is cached by `key`.

    Raises:
        InputError: The outputs differ by more than a tie; no speedup may be printed.
    """
    prompts = openings(engine)
    name = key(engine, prompts)
    found = None if name is None else _read(remembered.read("gate", {"pair": name}))
    if found is None:
        room = engine.parts.target.max_context - max(len(p) for p in prompts)
        found = identity(in_float32(engine), prompts, min(NUM_TOKENS, room))
        if name is not None:
            # A gap that is not a number is not kept.
            with suppress(ValueError):
                remembered.write("gate", {"pair": name}, asdict(found))
    if not found.holds:
        worst = next(d for d in found.differences if not d.tie)
        raise InputError(
            f"this pair is not greedy-identical in float32: prompt {worst.prompt}, token {worst.position}, logit gap "
            f"{worst.gap:.3g}; no speedup is printed for it. `outrider prove` shows more"
        )
    return found


def openings(engine: Engine) -> list[list[int]]:
    """The prompts of the check; without a tokenizer, three lists of low token ids."""
    return [engine.encode(p) for p in PROMPTS] if engine.tokenizer else [[1], [2, 3], [3, 1, 2]]


def _read(kept: Mapping[str, Any] | None) -> Identity | None:
    """The result that was remembered; None if there is none or it makes no sense."""
    if kept is None:
        return None
    try:
        differences = tuple(
            Difference(
                prompt=int(each["prompt"]),
                position=int(each["position"]),
                plain=int(each["plain"]),
                drafted=int(each["drafted"]),
                gap=float(each["gap"]),
                span=float(each["span"]),
            )
            for each in kept["differences"]
        )
        return Identity(num_tokens=int(kept["num_tokens"]), differences=differences)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def in_float32(engine: Engine) -> Engine:
    """The same engine in float32. Models in float32 or float64 and quantised models are used unchanged."""
    parts = engine.parts
    target = parts.target.cast(torch.float32)
    drafter = parts.drafter.cast(Surroundings.of(target, engine.tokenizer))
    return Engine(
        replace(parts, target=target, drafter=drafter, experience=Experience()),
        tokenizer=engine.tokenizer,
        eos_ids=engine.eos_ids,
        max_slots=engine.max_slots,
    )


def key(engine: Engine, prompts: Sequence[Sequence[int]], package: Path = PACKAGE) -> str | None:
    """A hash of everything that the outputs of a pair depend on; None if something cannot be read.

    Args:
        package: Where the source lies that decodes.
    """
    return fingerprint(
        source(package),
        (torch.__version__, version("torch"), version("transformers")),
        machine(engine.parts.target.device),
        engine.parts,
        (engine.max_slots, engine.max_prefill_tokens, engine.eos_ids),
        [list(prompt) for prompt in prompts],
    )
