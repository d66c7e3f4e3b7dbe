"""Block verification: judge the whole block at once (Sun et al. 2024)."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from torch import Tensor

from outrider.core.dice import Dice, Purpose
from outrider.core.types import Draft, Verdict
from outrider.verifiers.protocol import chains, everyone, gains, recover
from outrider.verifiers.traits import CHAINS, StatedVerifier


@dataclass(frozen=True, kw_only=True)
class BlockVerifier(StatedVerifier):
    r"""Throw one independent coin per position; accept up to the last position whose coin allows it.

    With $w_0 = 1$ and $w_i = \min(1, w_{i-1}\, p(x_i)/q(x_i))$, position $i$ is allowed with probability
    $h_i = A_i / (A_i + 1 - w_i)$, where $A_i = \sum_x (w_i p(x) - q(x))_+$ after $x_1 \ldots x_i$, and $h = w$ at the
    end of the chain. After $\tau$ accepted tokens the next one is drawn from $(w_\tau p - q)_+$; after all of them,
    from $p$. Then $P(\tau \ge i \mid x) = w_i$, never less than token verification in expectation.

    The coins are thrown from the last position down, until one allows its position. They are independent, so the order
    does not matter.

    References:
        Sun et al. 2024, algorithm 2. https://arxiv.org/abs/2403.10444
    """

    kinds = CHAINS
    takes_likeliest = True

    def verify(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Verdict:
        side = chains(draft, target_rows)
        ratios, w = side.ratios, np.ones((len(side.roots), side.depth + 1))
        for i in range(side.depth):
            w[:, i + 1] = np.minimum(1, w[:, i] * ratios[:, i])
        h = w.copy()
        position = np.arange(side.depth + 1)
        # Where w is 1 or 0, so is h, whatever the rows are.
        inner = (position > 0) & (position < side.lengths[:, None]) & (w > 0) & (w < 1)
        if inner.any():
            nodes = (side.roots[:, None] + position)[inner]
            mass = gains(draft, nodes, w[inner], target_rows)
            below = mass + (1 - w[inner])
            h[inner] = np.where(below > 0, mass / np.where(below > 0, below, 1), 1)
        num_accepted = np.zeros_like(side.lengths)
        for i in range(side.depth, 0, -1):
            undecided = (num_accepted == 0) & (i <= side.lengths)
            chances = h[:, i] * undecided
            if not ((chances > 0) & (chances < 1)).any():
                landed = chances == 1
            else:
                landed = dice.accept(chances, everyone(draft, i - 1, Purpose.ACCEPT))
            num_accepted[undecided & landed] = i
        last, rejected = side.roots + num_accepted, num_accepted < side.lengths
        weight = w[np.arange(len(last)), num_accepted]
        return side.verdict(num_accepted, recover(draft, dice, target_rows, last, rejected, weight))
