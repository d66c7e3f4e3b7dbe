"""The gate before any printed speedup: a lossless combination, and greedy identity of this very pair in float32."""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

import torch

from outrider.core.types import InputError
from outrider.engine.engine import Engine
from outrider.lengths.experience import Experience
from outrider.lm.fingerprint import fingerprint, machine, source
from outrider.lm.target_info import TargetInfo
from outrider.proof.identity import Difference, Identity, identity

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
    found = None if name is None else _kept(_cache() / f"{name}.json")
    if found is None:
        room = engine.parts.target.max_context - max(len(p) for p in prompts)
        found = identity(in_float32(engine), prompts, min(NUM_TOKENS, room))
        if name is not None:
            _keep(_cache() / f"{name}.json", found)
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


def _kept(place: Path) -> Identity | None:
    """The cached result; None if there is none or it cannot be read."""
    try:
        kept = json.loads(place.read_text())
        return Identity(num_tokens=kept["num_tokens"], differences=tuple(Difference(**d) for d in kept["differences"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(place: Path, found: Identity) -> None:
    """Cache a result, if the cache folder can be written."""
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        fresh = place.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(asdict(found)))
        fresh.rename(place)


def in_float32(engine: Engine) -> Engine:
    """The same engine in float32. Models in float32 or float64 and quantised models are used unchanged."""
    parts = engine.parts
    target = parts.target.cast(torch.float32)
    drafter = parts.drafter.cast(TargetInfo.of(target, engine.tokenizer))
    return Engine(
        replace(parts, target=target, drafter=drafter, experience=Experience()),
        tokenizer=engine.tokenizer,
        eos_ids=engine.eos_ids,
        max_slots=engine.max_slots,
    )


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider" / "gate"


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
