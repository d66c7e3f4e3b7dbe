"""The progress of a request: begin, prefill, cut at its end, and undo a failed step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from outrider.core.types import Request, Running
from outrider.decoding.drafting import drafter_of, observe
from outrider.decoding.protocol import Keep, Parts
from outrider.decoding.reading import LogProbs
from outrider.drafters.protocol import Observed
from outrider.lm.protocol import Segment
from outrider.lm.slots.budget import prefill_size


def begin(parts: Parts, request: Request) -> Running:
    """Start a request in an empty slot. Raises RuntimeError if no slot is free."""
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
    """Release the slot and the drafter state of a request."""
    parts.target.release(state.slot)
    drafter_of(state).close(state.drafter_state)


def pending_tokens(parts: Parts, state: Running) -> list[int]:
    """The committed tokens before the anchor that the target's cache lacks."""
    return state.tokens[parts.target.length(state.slot) : -1]


def prefill(parts: Parts, state: Running) -> None:
    """Run the target on all tokens but the newest, chunk by chunk."""
    while left := len(pending_tokens(parts, state)):
        prefill_chunk(parts, [state], [min(left, prefill_size(parts.target.device))])


@torch.inference_mode()
def prefill_chunk(parts: Parts, states: Sequence[Running], counts: Sequence[int]) -> list[LogProbs | None]:
    """Run the target on the next `counts[i]` tokens of request i, in one forward; at least one, never the newest.

    Returns:
        For each request that wants them, the log-probabilities of the prompt's tokens behind the chunk's tokens; None
        for all others.

    Raises:
        ValueError: The requests have different drafters.
    """
    drafter = drafter_of(states[0])
    if any(state.drafter is not drafter for state in states):
        raise ValueError("requests with different drafters cannot be prefilled in one forward")
    chunks = [pending_tokens(parts, state)[:count] for state, count in zip(states, counts, strict=True)]
    extension = parts.target.extend(
        [
            Segment(
                slot=state.slot,
                tokens=torch.tensor(chunk).to(parts.target.device),
                logits="none" if state.request.prompt_logprobs is None else "all",
            )
            for state, chunk in zip(states, chunks, strict=True)
        ],
        taps=drafter.taps,
    )
    logprobs = _prompt_logprobs(parts, states, counts, extension.logits)
    parts.target.commit({state.slot: range(len(chunk)) for state, chunk in zip(states, chunks, strict=True)})
    observed = Observed(
        tokens=np.array([token for chunk in chunks for token in chunk], dtype=np.int64),
        offsets=np.cumsum([0, *map(len, chunks)]),
        taps=extension.taps,
    )
    observe(parts, states, observed)
    return logprobs


def _prompt_logprobs(
    parts: Parts, states: Sequence[Running], counts: Sequence[int], logits: Float[Tensor, "wanted vocab"]
) -> list[LogProbs | None]:
    """The log-probabilities of the tokens behind those of a chunk, for each request that wants them.

    Args:
        counts: Number of new tokens of each request; its cache does not hold them yet.
        logits: After the new tokens of these requests, packed.
    """
    logprobs: list[LogProbs | None] = []
    first = 0
    for state, count in zip(states, counts, strict=True):
        wanted = state.request.prompt_logprobs
        if wanted is None:
            logprobs.append(None)
            continue
        start = parts.target.length(state.slot) + 1
        following = state.tokens[start : start + count]
        logprobs.append(LogProbs.in_parts(logits[first : first + count], following, wanted))
        first += count
    return logprobs


def tokens_left(parts: Parts, state: Running) -> int:
    """How many tokens the request may still emit."""
    return min(state.request.max_new_tokens - len(state.output), parts.target.max_context - len(state.tokens))


def cut(parts: Parts, state: Running, tokens: list[int], keep: Keep | None) -> list[int]:
    """The tokens up to the request's end: an end token, its token limit, or the count that `keep` returns."""
    tokens = tokens[: tokens_left(parts, state)]
    for i, token in enumerate(tokens):
        if token in state.request.eos_ids:
            tokens = tokens[: i + 1]
            break
    return tokens if keep is None else tokens[: keep(state, tokens)]


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A copy of a request's fields before a step, so that a failed step can be undone.

    Attributes:
        state: The copied fields. Its `tokens` is the request's own list, not a copy.
        num_tokens: Length of that list before the step.
    """

    state: Running
    num_tokens: int


def mark(state: Running) -> Mark:
    """Copy a request's fields before a step."""
    return Mark(state=replace(state), num_tokens=len(state.tokens))


def rewind(parts: Parts, state: Running, to: Mark) -> None:
    """Put a request back to where it was before a failed step.

    The constraint's state is dropped; the next step rebuilds it. The target keeps its cache, and the drafter its state,
    up to the position from which the drafter must see hidden states again.
    """
    del state.tokens[to.num_tokens :]
    vars(state).update(vars(to.state))
    drafter = drafter_of(state)
    num_read = min(parts.target.length(state.slot), to.num_tokens - 1)
    parts.target.truncate(state.slot, min(num_read, drafter.needs(state.drafter_state, num_read)))
    state.drafter_state = drafter.reuse(state.drafter_state, state.request, num_read)
    state.constraint_state = None
