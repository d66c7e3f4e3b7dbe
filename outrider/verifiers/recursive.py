"""Recursive rejection: try a node's children in drawing order, each against the residual so far (MCSD, SpecInfer)."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.core.dice import Dice
from outrider.core.types import Draft, Verdict
from outrider.verifiers.protocol import Decision, child_rows, ratio, undrafted, upload
from outrider.verifiers.traits import CHAINS, StatedVerifier
from outrider.verifiers.walk import Brood, JudgedNodes, Walk, brood, coins, decided, inner_nodes, owners


@dataclass(frozen=True, kw_only=True)
class RecursiveVerifier(StatedVerifier):
    r"""At each node, with $P = p$ and $Q = q$, accept the next child x with probability $\min(1, P(x)/Q(x))$ and
    descend, or else set $P \propto (P - Q)_+$; after the last child draw from $P$ and stop.

    Children drawn without replacement, or de-duplicated, were drawn from $q$ without the earlier children, so after a
    rejection $Q(x) = 0$ too. Independent draws keep $Q = q$, and repeated draws are tried again. Independent draws are
    exchangeable, so SpecInfer's random order gives the same law. In a union of chains, only the first child was drawn,
    and each other one is a point mass.

    The probabilities at a node depend on the order of its children only, not on outcomes. So they are computed on the
    device, and copied to the host once per level.

    References:
        Miao et al. 2023, SpecInfer, algorithm 2 (with replacement). https://arxiv.org/abs/2305.09781
        Yang et al. 2024, MCSD (both). https://arxiv.org/abs/2401.06706
        Jeon et al. 2024, RSD (without). https://arxiv.org/abs/2402.14160
    """

    kinds = CHAINS | {"iid paths", "deduplicated iid paths", "tree drawn without replacement", "union of chains"}
    takes_likeliest = True

    def verify(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Verdict:
        if target_rows.device.type != "cpu":
            return self.decide(draft, target_rows, dice).verdict(draft)
        walk = Walk(draft)
        while len(walk.active):
            children = walk.brood()
            P = target_rows[upload(walk.nodes, target_rows.device)]
            chances = np.zeros(children.nodes.shape)
            if children.counts.any():
                P, tried = _try(draft, walk.nodes, children, P)
                chances = tried.numpy()
            stopped = walk.go(coins(walk, children, chances, dice))
            walk.recover(stopped, P, dice)
        return walk.verdict()

    def decide(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Decision:
        nodes = inner_nodes(draft)
        if not len(nodes):
            return undrafted(draft, target_rows, dice)
        children = brood(draft, owners(draft)[nodes], nodes)
        after, chances = _try(draft, nodes, children, target_rows.index_select(0, upload(nodes, target_rows.device)))
        return decided(draft, target_rows, JudgedNodes(nodes=nodes, chances=chances, after=after), dice)


def _try(
    draft: Draft, nodes: Int[np.ndarray, " n"], children: Brood, p: Float[Tensor, "n vocab"]
) -> tuple[Float[Tensor, "n vocab"], Float[Tensor, "n most"]]:
    """The target's row after all children are rejected, and the probability of each child when it is tried."""
    P, Q = p, child_rows(draft, nodes, p)
    tokens = draft.tokens[upload(children.nodes.clip(0), P.device)]
    missing = upload(children.nodes < 0, P.device)
    ragged = bool((children.nodes < 0).any())
    mass_p, mass_q = P.sum(-1, keepdim=True), Q.sum(-1, keepdim=True)
    above, below = [], []
    for k in range(tokens.shape[1]):
        x = tokens[:, k : k + 1]
        above.append(P.gather(1, x) * mass_q)
        below.append(Q.gather(1, x) * mass_p)
        left = torch.mul(Q, mass_p / mass_q)
        torch.sub(P, left, out=left).clamp_min_(0)
        mass = left.sum(-1, keepdim=True)
        # Without mass nothing is left to reject; rounding alone leads here, and the row before stands.
        stays = (mass <= 0) | missing[:, k : k + 1] if ragged else mass <= 0
        P, mass_p = torch.where(stays, P, left), torch.where(stays, mass_p, mass)
        if draft.structure == "union":
            Q.zero_().scatter_(1, tokens[:, min(k + 1, tokens.shape[1] - 1), None], 1.0)
            mass_q = torch.ones_like(mass_q)
        elif draft.structure != "iid":
            Q.scatter_(1, x, 0.0)
            mass_q = Q.sum(-1, keepdim=True)
    return P, ratio(torch.cat(above, 1), torch.cat(below, 1))
