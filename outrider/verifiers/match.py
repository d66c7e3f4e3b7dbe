"""Match: draw from the target and go on while the draw is in the draft (naive sampling; EAGLE, Medusa, DDTree)."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from outrider.dice import Dice
from outrider.types import Draft, Verdict
from outrider.verifiers.protocol import everyone


@dataclass(frozen=True, kw_only=True)
class Match:
    r"""Draw $y \sim p$ at a node; if a child holds $y$ go there, else stop and emit $y$.

    Never looks at how the draft was made, so it is lossless for every structure, and optimal for chosen children: the
    expected number of accepted tokens is the sum over nodes of the target's probability of their path.

    References:
        Li et al. 2024, EAGLE, section 3.3. https://arxiv.org/abs/2401.15077
        Yang et al. 2024, MCSD (naive mode). https://arxiv.org/abs/2401.06706
    """

    def verify(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Verdict:
        device = target_rows.device
        children = _child_table(draft)
        table = torch.from_numpy(children).to(device)
        here = torch.from_numpy(draft.offsets[:-1]).to(device)
        depth = int(draft.depths.max(initial=0))
        walking = torch.ones_like(here, dtype=torch.bool)
        num_accepted = torch.zeros_like(here)
        next_tokens = torch.zeros_like(here)
        path = []
        for i in range(depth + 1):
            drawn = dice.pick(target_rows[here], everyone(draft, i, "recover", walking))
            next_tokens = torch.where(walking, drawn, next_tokens)
            candidates = table[here]
            hit = (candidates >= 0) & (draft.tokens[candidates.clamp_min(0)] == drawn[:, None])
            walking = walking & hit.any(-1)
            child = candidates.gather(1, hit.long().argmax(-1, keepdim=True)).squeeze(1)
            here = torch.where(walking, child, here)
            num_accepted = num_accepted + walking
            path.append(torch.where(walking, child, -1))
        return Verdict(paths=torch.stack(path, 1)[:, :depth], num_accepted=num_accepted, next_tokens=next_tokens)


def _child_table(draft: Draft) -> np.ndarray:
    """Children of every node side by side, padded with -1 to at least one column."""
    counts = np.diff(draft.first_child)
    table = np.full((len(counts), max(1, counts.max(initial=0))), -1)
    column = np.arange(len(draft.links)) - np.repeat(draft.first_child[:-1], counts)
    table[np.repeat(np.arange(len(counts)), counts), column] = draft.links
    return table
