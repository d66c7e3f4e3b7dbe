"""The rule for the top n-1 tokens and one draw: it attains the optimum of its draft (Hu et al. 2025)."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.core.dice import Dice, Draws, Purpose
from outrider.core.types import Draft, Verdict
from outrider.verifiers.protocol import Decision, child_rows, ratio, upload
from outrider.verifiers.traits import CHAINS, StatedVerifier
from outrider.verifiers.walk import Brood, JudgedNodes, Walk, brood, child_with, coins, followed, inner_nodes, owners


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
        if target_rows.device.type != "cpu":
            return self.decide(draft, target_rows, dice).verdict(draft)
        walk = Walk(draft)
        depth = 0
        while len(walk.active):
            children = walk.brood()
            weights = target_rows[upload(walk.nodes, target_rows.device)]
            final, chances = children.last(), np.zeros((len(children.nodes), 1))
            inner = np.flatnonzero(children.counts)
            if len(inner):
                at = upload(inner, weights.device)
                judged = _judge(draft, walk.nodes[inner], children.part(inner), weights[at])
                chances[inner], weights[at] = judged.chances.numpy(), judged.after
            self._go(draft, walk, children, coins(walk, final, chances, dice), weights, dice, depth)
            depth += 1
        return walk.verdict()

    def decide(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Decision:
        nodes, device, requests = inner_nodes(draft), target_rows.device, owners(draft)
        children, at = brood(draft, requests[nodes], nodes), upload(nodes, device)
        judged = _judge(draft, nodes, children, target_rows.index_select(0, at))
        final = children.last()
        draws = Draws(requests=requests[nodes], slots=final.slots[:, 0], purpose=Purpose.ACCEPT)
        landed = dice.toss(judged.chances[:, 0], draws)
        # A token is drawn at every node, for a walk that is not accepted there.
        weights = target_rows.index_copy(0, at, judged.after)
        drawn = dice.pick(weights, Draws(requests=requests, slots=draft.depths, purpose=Purpose.RECOVER))
        onward = torch.where(landed, upload(final.nodes[:, 0], device), child_with(draft, nodes, drawn[at]))
        last = followed(draft, nodes, onward)
        return Decision(last=last, next_tokens=drawn[last])

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
        tokens, drawn_tokens = draft.tokens.cpu().numpy(), drawn.cpu().numpy()
        nodes = np.pad(children.nodes[rejected], ((0, 0), (0, 1)), constant_values=-1)
        hits = (nodes >= 0) & (tokens[nodes.clip(0)] == drawn_tokens[:, None])
        # Where none hits, the first place of an all-False row would be a child; the padding behind them is not.
        place = np.where(hits.any(1), hits.argmax(1), nodes.shape[1] - 1)
        accepted[rejected] = nodes[np.arange(len(nodes)), place]
        stopped = walk.go(accepted)
        walk.stop(stopped, drawn[upload(np.flatnonzero(~hits.any(1)), drawn.device)])


def _judge(draft: Draft, nodes: Int[np.ndarray, " n"], children: Brood, p: Float[Tensor, "n vocab"]) -> JudgedNodes:
    """The chance of the drawn child, which is the last, of nodes with these children and these rows of the target."""
    final = children.counts - 1
    q = child_rows(draft, nodes, p)
    rows, ranks = np.nonzero(np.arange(children.nodes.shape[1]) < final[:, None])
    q[upload(rows, q.device), draft.tokens[upload(children.nodes[rows, ranks], q.device)]] = 0
    q /= q.sum(-1, keepdim=True)
    x = draft.tokens[upload(children.nodes[np.arange(len(final)), final], q.device)][:, None]
    chances = ratio(p.gather(1, x), q.gather(1, x))
    left = (p - q).clamp_min_(0)
    return JudgedNodes(nodes=nodes, chances=chances, after=torch.where(left.sum(-1, keepdim=True) > 0, left, p))
