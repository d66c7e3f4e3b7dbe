"""The rule for the top n-1 tokens and one draw: it attains the optimum of its draft (Hu et al. 2025)."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.core.dice import Dice, Draws, Purpose
from outrider.core.types import Draft, Verdict
from outrider.verifiers.protocol import child_rows, ratio, upload
from outrider.verifiers.traits import CHAINS, StatedVerifier
from outrider.verifiers.walk import Brood, Walk, coins


@dataclass(frozen=True, kw_only=True)
class TopPlusOneVerifier(StatedVerifier):
    r"""Token verification of the drawn child, under its own law. The recovered token may be one of the chosen children.

    With T the children that were chosen and $\tilde q$ the row without them, renormalised, the drawn child x is
    accepted with probability $\min(1, p(x)/\tilde q(x))$; else a token is drawn from $(p - \tilde q)_+$, which includes
    all of $p(T)$. If that token is in T, the walk continues there.

    References:
        Hu et al. 2025, section 4. https://arxiv.org/abs/2502.18779
    """

    kinds = CHAINS | {"top n-1 and one draw"}
    takes_likeliest = True

    def verify(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Verdict:
        walk = Walk(draft)
        depth = 0
        while len(walk.active):
            children = walk.brood()
            weights = target_rows[upload(walk.nodes, target_rows.device)]
            last, chances = _judge(draft, walk, children, weights)
            self._go(draft, walk, children, coins(walk, last, chances, dice), weights, dice, depth)
            depth += 1
        return walk.verdict()

    def _go(
        self,
        draft: Draft,
        walk: Walk,
        children: Brood,
        accepted: Int[np.ndarray, " active"],
        weights: Float[Tensor, "active vocab"],
        dice: Dice,
        depth: int,
    ) -> None:
        """Draw a token wherever none was accepted; go to the child that holds it, or stop."""
        rejected = np.flatnonzero(accepted < 0)
        if not len(rejected):
            walk.go(accepted)
            return
        draws = Draws(requests=walk.active[rejected], slots=np.full(len(rejected), depth), purpose=Purpose.RECOVER)
        drawn = dice.pick(weights[upload(rejected, weights.device)], draws)
        tokens, found = draft.tokens.cpu().numpy(), drawn.cpu().numpy()
        own = np.pad(children.nodes[rejected], ((0, 0), (0, 1)), constant_values=-1)
        hits = (own >= 0) & (tokens[own.clip(0)] == found[:, None])
        # Where none hits, the first place of an all-False row would be a child; the padding behind them is not.
        place = np.where(hits.any(1), hits.argmax(1), own.shape[1] - 1)
        accepted[rejected] = own[np.arange(len(own)), place]
        stopped = walk.go(accepted)
        walk.stop(stopped, drawn[upload(np.flatnonzero(~hits.any(1)), drawn.device)])


def _judge(
    draft: Draft, walk: Walk, children: Brood, weights: Float[Tensor, "active vocab"]
) -> tuple[Brood, Float[np.ndarray, "active 1"]]:
    """The drawn child of each active request with its chance; the weights become those of the recovered token."""
    final = np.maximum(children.counts - 1, 0)[:, None]
    inner = np.flatnonzero(children.counts)
    chances = np.zeros((len(final), 1))
    if not len(inner):
        none = np.full_like(final, -1)
        return Brood(nodes=none, slots=none), chances
    last = Brood(nodes=np.take_along_axis(children.nodes, final, 1), slots=np.take_along_axis(children.slots, final, 1))
    at = upload(inner, weights.device)
    p, own = weights[at], children.nodes[inner]
    q = child_rows(draft, walk.nodes[inner], p)
    rows, ranks = np.nonzero(np.arange(own.shape[1]) < final[inner])
    q[upload(rows, q.device), draft.tokens[upload(own[rows, ranks], q.device)]] = 0
    q /= q.sum(-1, keepdim=True)
    x = draft.tokens[upload(last.nodes[inner, 0], q.device)][:, None]
    chances[inner] = ratio(p.gather(1, x), q.gather(1, x))
    left = (p - q).clamp_min_(0)
    weights[at] = torch.where(left.sum(-1, keepdim=True) > 0, left, p)
    return last, chances
