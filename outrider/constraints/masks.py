"""Which tokens may follow the nodes of a whole batch of drafts."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from outrider.core.types import Running


def follow(states: Sequence[Running]) -> None:
    """Open each constraint that is not open yet, and commit the output so far to it."""
    for state in states:
        constraint = state.request.constraint
        if constraint is not None and state.constraint_state is None:
            state.constraint_state = constraint.open()
            constraint.commit(state.constraint_state, state.output)


def is_masked(state: Running) -> bool:
    """Whether any token is forbidden next in a request's output."""
    return state.request.constraint is not None or len(state.output) < state.request.min_tokens


def batch_masks(
    states: Sequence[Running],
    owners: Int[np.ndarray, " nodes"],
    tokens: Int[Tensor, " nodes"],
    parents: Int[np.ndarray, " nodes"],
    vocab_size: int,
) -> Int[Tensor, "nodes words"] | None:
    """The tokens that may follow each node of many drafts, as packed masks on the host; None if all are allowed.

    Masks come from constraints. Before `min_tokens` end tokens are forbidden too.

    Args:
        owners: Each node's request. The nodes of one request are in order, its root first.
        parents: Number of each node's parent within its request, -1 for roots.
    """
    masked = [owner for owner in np.unique(owners).tolist() if is_masked(states[owner])]
    if not masked:
        return None
    token_ids = tokens.cpu().numpy()
    allowed = torch.full((len(owners), -(-vocab_size // 32)), -1, dtype=torch.int32)
    for owner in masked:
        state, nodes = states[owner], np.flatnonzero(owners == owner)
        above = parents[nodes].tolist()
        masks = allowed[torch.from_numpy(nodes)]
        if state.request.constraint is not None:
            masks = state.request.constraint.masks(state.constraint_state, token_ids[nodes].tolist(), above).clone()
        _forbid_ends(masks, state, above)
        allowed[torch.from_numpy(nodes)] = masks
    return allowed


def _forbid_ends(masks: Int[Tensor, "nodes words"], state: Running, parents: Sequence[int]) -> None:
    """Forbid end tokens, in place, after nodes that come before `min_tokens`."""
    left = state.request.min_tokens - len(state.output)
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    early = torch.tensor([depth < left for depth in depths])
    for token in state.request.eos_ids if bool(early.any()) else ():
        word, bit = divmod(token, 32)
        # The highest bit of a signed word is its sign.
        masks[early, word] &= ~(1 << bit if bit < 31 else -(1 << 31))
