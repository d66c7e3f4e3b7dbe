"""How far a request is: what is not digested yet, what may still come, and back to where it stood."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from outrider.decoding.drafting import drafter_of
from outrider.decoding.protocol import Keep, Parts
from outrider.drafters.protocol import Observed
from outrider.lm.protocol import Segment
from outrider.types import Request, Running

PREFILL_CHUNK = 512
"""Most prompt tokens that one forward digests, unless an engine is told otherwise."""


def begin(parts: Parts, request: Request) -> Running:
    """A request with a slot of its own, of which nothing is digested. Raises RuntimeError when no slot is free."""
    slot = parts.target.open()
    try:
        return Running(
            request=request,
            tokens=list(request.prompt),
            slot=slot,
            drafter=parts.drafter,
            drafter_state=parts.drafter.open(request),
            length_state=parts.length.open(),
        )
    except BaseException:
        parts.target.release(slot)
        raise


def end(parts: Parts, state: Running) -> None:
    """Give back what a request holds."""
    parts.target.release(state.slot)
    drafter_of(state).close(state.drafter_state)


def undigested(parts: Parts, state: Running) -> list[int]:
    """The tokens before the newest one that the target has not digested."""
    return state.tokens[parts.target.length(state.slot) : -1]


def prefill(parts: Parts, state: Running) -> None:
    """Digest all tokens but the newest, chunk by chunk."""
    while left := len(undigested(parts, state)):
        digest(parts, [state], [min(left, PREFILL_CHUNK)])


@torch.inference_mode()
def digest(parts: Parts, states: Sequence[Running], counts: Sequence[int]) -> None:
    """Run the target on the next `counts[i]` tokens of request i, in one forward: at least one, never the newest.

    Raises:
        ValueError: The requests have different drafters.
    """
    drafter = drafter_of(states[0])
    if any(state.drafter is not drafter for state in states):
        raise ValueError("requests with different drafters cannot be digested in one forward")
    chunks = [undigested(parts, state)[:count] for state, count in zip(states, counts, strict=True)]
    extension = parts.target.extend(
        [
            Segment(slot=state.slot, tokens=torch.tensor(chunk).to(parts.target.device), logits="none")
            for state, chunk in zip(states, chunks, strict=True)
        ],
        taps=drafter.taps,
    )
    parts.target.commit({state.slot: range(len(chunk)) for state, chunk in zip(states, chunks, strict=True)})
    observed = Observed(
        tokens=np.array([token for chunk in chunks for token in chunk], dtype=np.int64),
        offsets=np.cumsum([0, *map(len, chunks)]),
        taps=extension.taps,
    )
    drafter.observe(states, observed)


def tokens_left(parts: Parts, state: Running) -> int:
    """How many tokens the request may still emit."""
    return min(state.request.max_new_tokens - len(state.output), parts.target.max_context - len(state.tokens))


def cut(parts: Parts, state: Running, tokens: list[int], keep: Keep | None) -> list[int]:
    """The tokens up to the request's end: an ending token, its last token, or what `keep` says."""
    tokens = tokens[: tokens_left(parts, state)]
    for i, token in enumerate(tokens):
        if token in state.request.eos_ids:
            tokens = tokens[: i + 1]
            break
    return tokens if keep is None else tokens[: keep(state, tokens)]


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Where a request stood before a step, so that a step that fails can be taken back.

    Attributes:
        state: The request's fields as they were; its `tokens` are the request's own list.
        num_tokens: How many of these there were.
    """

    state: Running
    num_tokens: int


def mark(state: Running) -> Mark:
    """Note where a request stands."""
    return Mark(state=replace(state), num_tokens=len(state.tokens))


def rewind(parts: Parts, state: Running, to: Mark) -> None:
    """Put a request back to where it stood before a step that failed.

    The constraint opens it anew and learns its tokens again. The target keeps what it has digested, and the drafter
    what it knows, up to the position from which it must see hidden states again.
    """
    del state.tokens[to.num_tokens :]
    vars(state).update(vars(to.state))
    drafter = drafter_of(state)
    digested = min(parts.target.length(state.slot), to.num_tokens - 1)
    parts.target.truncate(state.slot, min(digested, drafter.needs(state.drafter_state, digested)))
    state.drafter_state = drafter.reuse(state.drafter_state, state.request, digested)
    state.constraint_state = None
