"""The gate before any printed speedup: a lossless combination, and greedy identity of this very pair in float32."""

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch
import transformers

from outrider.drafters.protocol import Surroundings
from outrider.engine.engine import Engine
from outrider.proof.identity import Difference, Identity, identity
from outrider.types import InputError

NUM_TOKENS = 32
PROMPTS = ("Once upon a time", "The answer to the question is", "def main(")
"""Three openings; without a tokenizer, three lists of low token ids."""


def gate(engine: Engine) -> Identity:
    """Greedy identity of the engine's pair in float32, on 3 prompts x 32 tokens; remembered by weights and versions.

    Raises:
        InputError: The outputs differ by more than a tie; no speedup may be printed.
    """
    place = _cache() / f"{_fingerprint(engine)}.json"
    found = _kept(place)
    if found is None:
        exact = in_float32(engine)
        prompts = [exact.encode(p) for p in PROMPTS] if exact.tokenizer else [[1], [2, 3], [3, 1, 2]]
        room = engine.parts.target.max_context - max(len(p) for p in prompts)
        found = identity(exact, prompts, min(NUM_TOKENS, room))
        _keep(place, found)
    if not found.holds:
        worst = next(d for d in found.differences if not d.tie)
        raise InputError(
            f"this pair is not greedy-identical in float32: prompt {worst.prompt}, token {worst.position}, logit gap "
            f"{worst.gap:.3g}; no speedup is printed for it. `outrider prove` shows more"
        )
    return found


def _kept(place: Path) -> Identity | None:
    """What was found before; None where nothing was, or it cannot be read."""
    try:
        kept = json.loads(place.read_text())
        return Identity(num_tokens=kept["num_tokens"], differences=tuple(Difference(**d) for d in kept["differences"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(place: Path, found: Identity) -> None:
    """Remember what was found, where there is a place to write to."""
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        fresh = place.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(asdict(found)))
        fresh.rename(place)


def in_float32(engine: Engine) -> Engine:
    """The same engine in float32; models that compute in it already, or better, or are quantised, stay as they are."""
    parts = engine.parts
    target = parts.target.cast(torch.float32)
    drafter = parts.drafter.cast(Surroundings.of(target, engine.tokenizer))
    return Engine(
        replace(parts, target=target, drafter=drafter),
        tokenizer=engine.tokenizer,
        eos_ids=engine.eos_ids,
        max_slots=engine.max_slots,
    )


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider" / "gate"


def _fingerprint(engine: Engine) -> str:
    """Names of the parts, versions, configurations and a sample of every weight, as one hash."""
    digest = hashlib.sha256()
    parts = engine.parts
    for text in (torch.__version__, transformers.__version__, parts.tree, parts.verifier, parts.length, parts.decoding):
        digest.update(repr(text).encode())
    drafter = parts.drafter
    digest.update((repr(drafter) if not drafter.modules else type(drafter).__name__).encode())
    digest.update(repr([(lm.max_context, lm.vocab_size) for lm in (parts.target,)]).encode())
    for name, module in sorted({**parts.target.modules, **drafter.modules}.items()):
        digest.update(name.encode())
        for key, weight in sorted(module.state_dict().items()):
            if not isinstance(weight, torch.Tensor):
                continue
            flat = weight.detach().flatten()
            sample = flat[:: max(1, flat.numel() // 1024)].float().cpu().numpy()
            digest.update(key.encode() + sample.tobytes())
    return digest.hexdigest()[:32]
