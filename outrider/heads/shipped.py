"""The heads that ship with Outrider, for targets that people have. Each is found by its target's weights."""

import json
from pathlib import Path

from outrider.embedded import ASSETS
from outrider.lm.hf.last_norm import norm_of

HEADS = ASSETS / "heads"
"""A folder for each head: its checkpoint, and `target.json` with the hash of its target's last norm and its options."""
CARD = "target.json"


def shipped_head(target: str, revision: str | None = None) -> str | None:
    """The drafter for a target, as the catalog writes it; None if no head for it ships.

    The target is told by the norm behind its last layer, so that its GGUF files find the head too. A model that was
    trained on from it may also find it. This changes no text: only fewer draft tokens are accepted.

    Args:
        target: A directory, a GGUF file or a hub id. One that is not on this disk yet has no head.
        revision: Branch, tag or commit of a hub id.
    """
    cards = sorted(HEADS.glob(f"*/{CARD}"))
    norm = norm_of(target, revision) if cards else None
    return next((drafter for card in cards if (drafter := _drafter(card, norm)) is not None), None)


def _drafter(card: Path, norm: str | None) -> str | None:
    """The drafter of a card, if the head is for a target with this norm."""
    told = json.loads(card.read_text(encoding="utf-8"))
    if norm is None or told["norm"] != norm:
        return None
    options = [f"path={card.parent}", *(f"{name}={card.parent / file}" for name, file in told["files"].items())]
    return f"{told['drafter']}:{','.join(options)}"
