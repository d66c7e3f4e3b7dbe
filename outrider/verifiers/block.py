"""Block verification: judge the whole block at once (Sun et al. 2024)."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from outrider.dice import Dice
from outrider.types import Draft, Verdict
from outrider.verifiers.protocol import chain_verdict, chains, child_rows, everyone, residual


@dataclass(frozen=True, kw_only=True)
class Block:
    r"""Accept the longest prefix that one of independent coins, one per position, allows.

    With $w_0 = 1$ and $w_i = \min(1, w_{i-1}\, p(x_i)/q(x_i))$, position $i$ is allowed with probability
    $h_i = A_i / (A_i + 1 - w_i)$, where $A_i = \sum_x (w_i p(x) - q(x))_+$ after $x_1 \ldots x_i$, and $h = w$ at the
    end of the chain. After $\tau$ accepted tokens the next one is drawn from $(w_\tau p - q)_+$; after all of them,
    from $p$. Then $P(\tau \ge i \mid x) = w_i$, never less than token verification in expectation.

    The coins are thrown from the last position down and no further than needed; they are independent, so the order
    changes nothing.

    References:
        Sun et al. 2024, algorithm 2. https://arxiv.org/abs/2403.10444
    """

    def verify(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Verdict:
        side = chains(draft, target_rows)
        depth = side.nodes.shape[1]
        w = torch.ones_like(side.ratios)
        for i in range(depth):
            before = w[side.nodes[:, i - 1]] if i else torch.ones_like(side.lengths, dtype=w.dtype)
            present = i < side.lengths
            reached = torch.where(present, (before * side.ratios[side.nodes[:, i]]).clamp_max(1), w[side.nodes[:, i]])
            w[side.nodes[:, i]] = reached
        h = w.clone()
        inner = np.flatnonzero((draft.parents >= 0) & (np.diff(draft.first_child) > 0))
        if len(inner):
            nodes = torch.from_numpy(inner).to(w.device)
            p = target_rows[nodes]
            mass = (w[nodes, None].to(p.dtype) * p - child_rows(draft, nodes, p)).clamp_min(0).sum(-1).double()
            below = mass + 1 - w[nodes]
            h[nodes] = torch.where(below > 0, mass / below, torch.ones_like(below))
        num_accepted = torch.zeros_like(side.lengths)
        for i in range(depth, 0, -1):
            open_ = (num_accepted == 0) & (i <= side.lengths)
            landed = dice.accept(h[side.nodes[:, i - 1]] * open_, everyone(draft, i - 1, "accept"))
            num_accepted = torch.where(open_ & landed, i, num_accepted)
        last = side.roots(draft) + num_accepted
        p = target_rows[last]
        rejected = (num_accepted < side.lengths)[:, None]
        weighted = w[last, None].to(p.dtype) * p
        left = residual(weighted, child_rows(draft, last, p))
        return chain_verdict(
            draft, side, num_accepted, dice.pick(torch.where(rejected, left, p), everyone(draft, 0, "recover"))
        )
