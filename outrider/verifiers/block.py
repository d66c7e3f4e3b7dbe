"""Block verification: judge the whole block at once (Sun et al. 2024)."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from outrider.core.dice import Dice, Draws, Purpose
from outrider.core.types import Draft, Verdict
from outrider.verifiers.protocol import (
    Decision,
    chains,
    check_chains,
    child_rows,
    everyone,
    gains,
    recover,
    undrafted,
    upload,
)
from outrider.verifiers.traits import CHAINS, StatedVerifier
from outrider.verifiers.walk import inner_nodes, owners


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
        if target_rows.device.type != "cpu":
            return self.decide(draft, target_rows, dice).verdict(draft)
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

    def decide(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Decision:
        check_chains(draft)
        device, count, nodes = target_rows.device, draft.num_requests, inner_nodes(draft)
        if not len(nodes):
            return undrafted(draft, target_rows, dice)
        lengths, width = np.diff(draft.offsets) - 1, int(draft.depths.max()) + 1
        # Where each node with a child stands in a table of requests and positions.
        place = upload(owners(draft)[nodes] * width + draft.depths[nodes], device)
        p = target_rows.index_select(0, upload(nodes, device))
        q = child_rows(draft, nodes, p)
        x = draft.tokens[upload(nodes + 1, device)][:, None]
        above, below = p.gather(1, x).double(), q.gather(1, x).double()
        ratios = torch.zeros(count * width, dtype=torch.float64, device=device)
        ratios = ratios.index_copy_(0, place, (above / below).masked_fill_(below <= 0, 0.0)[:, 0]).view(count, width)
        w = [torch.ones_like(ratios[:, 0])]
        for i in range(width - 1):
            w.append((w[-1] * ratios[:, i]).clamp_(max=1))
        h = torch.stack(w, 1)
        node_h = h.view(-1)[place]
        left = p.mul(node_h[:, None].to(p)).sub_(q).clamp_min_(0)
        mass = left.sum(-1).double()
        chances = (
            h.view(-1).index_copy(0, place, torch.where(node_h < 1, mass / (mass + (1 - node_h)), node_h)).view(h.shape)
        )
        draws = Draws(
            requests=np.repeat(np.arange(count), width - 1),
            slots=np.tile(np.arange(width - 1), count),
            purpose=Purpose.ACCEPT,
        )
        position = np.arange(1, width)
        there = upload(np.where(position <= lengths[:, None], position, 0), device)
        accepted = (dice.toss(chances[:, 1:], draws) * there).amax(1)
        last = upload(draft.offsets[:-1], device) + accepted
        weights = target_rows.index_select(0, last)
        # A node with a child was followed by a rejection.
        index = np.full(len(draft.parents), -1)
        index[nodes] = np.arange(len(nodes))
        at = upload(index, device)[last]
        kept = (at >= 0) & (mass[at] > 0)
        weights = torch.where(kept[:, None], left[at], weights)
        return Decision(last=last, next_tokens=dice.pick(weights, everyone(draft, 0, Purpose.RECOVER)))
