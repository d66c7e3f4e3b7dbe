"""K-SEQ: judge all draws of a node by one discounted ratio (SpecTr, Sun et al. 2023)."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.core.dice import Dice
from outrider.core.types import Draft, Verdict
from outrider.verifiers.protocol import Decision, child_rows, ratio, upload
from outrider.verifiers.token import TokenVerifier
from outrider.verifiers.traits import CHAINS, StatedVerifier
from outrider.verifiers.walk import Brood, JudgedNodes, Walk, brood, coins, decided, inner_nodes, owners

ROUNDS = 30
"""Most rounds of the search for the discount; about eight are enough."""
FIXED_ROUNDS = 9
"""Rounds where asking whether they were enough would wait for the device. The rule is lossless after any of them."""
CLOSE = 1e-14
"""A gap or a bracket this small ends it."""


@dataclass(frozen=True, kw_only=True)
class KseqVerifier(StatedVerifier):
    r"""Accept each of a node's k independent draws with probability $\min(1, p(x)/(\rho\,q(x)))$, in order.

    With $\beta(\rho) = \sum_x \min(p(x)/\rho, q(x))$, one of them is accepted with probability $1 - (1 - \beta)^k$; the
    discount $\rho \in [1, k]$ is where that equals $\rho\beta$. After k rejections the next token is drawn from
    $p - \min(p/\rho, q)\,(1 - (1-\beta)^k)/\beta$. Any $\rho$ from there to k is lossless, so the search keeps the
    upper end of its bracket. k is the number of draws at the node, which is the number of paths through it.

    References:
        Sun et al. 2023, SpecTr, algorithm 2. https://arxiv.org/abs/2310.15141
    """

    kinds = CHAINS | {"iid paths"}
    takes_likeliest = True

    def verify(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Verdict:
        if target_rows.device.type != "cpu":
            return self.decide(draft, target_rows, dice).verdict(draft)
        walk = Walk(draft)
        while len(walk.active):
            children = walk.brood()
            weights = target_rows[upload(walk.nodes, target_rows.device)]
            inner = np.flatnonzero(children.counts)
            chances = np.zeros(children.nodes.shape)
            if len(inner):
                at = upload(inner, weights.device)
                judged = _judge(draft, walk.nodes[inner], children.part(inner), weights[at])
                chances[inner], weights[at] = judged.chances.numpy(), judged.after
            stopped = walk.go(coins(walk, children, chances, dice))
            walk.recover(stopped, weights, dice)
        return walk.verdict()

    def decide(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Decision:
        if not draft.branches and len(draft.links) == len(draft.parents) - draft.num_requests:
            # One draw at each node is token verification, with the same random numbers.
            return TokenVerifier().decide(draft, target_rows, dice)
        nodes = inner_nodes(draft)
        children = brood(draft, owners(draft)[nodes], nodes)
        p = target_rows.index_select(0, upload(nodes, target_rows.device))
        return decided(draft, target_rows, _judge(draft, nodes, children, p), dice)


def _judge(draft: Draft, nodes: Int[np.ndarray, " n"], children: Brood, p: Float[Tensor, "n vocab"]) -> JudgedNodes:
    """Nodes with these children and these rows of the target."""
    q = child_rows(draft, nodes, p)
    k = upload(children.counts[:, None], p.device).double()
    rho, beta = discount(p, q, k)
    x = draft.tokens[upload(children.nodes.clip(0), p.device)]
    chances = ratio(p.gather(1, x), q.gather(1, x).double() * rho)
    share = torch.where(beta > 0, _any(beta, k) / beta, 0.0)
    left = (p - torch.minimum(p / rho.to(p), q) * share.to(p)).clamp_min_(0)
    return JudgedNodes(nodes=nodes, chances=chances, after=torch.where(left.sum(-1, keepdim=True) > 0, left, p))


def discount(
    p: Float[Tensor, "n vocab"], q: Float[Tensor, "n vocab"], k: Float[Tensor, "n 1"]
) -> tuple[Float[Tensor, "n 1"], Float[Tensor, "n 1"]]:
    r"""$\rho$ and $\beta(\rho)$ of each row: the root of $1 - (1-\beta)^k - \rho\beta$, which falls from at least 0 at
    1 to at most 0 at k, from above.

    Example:
        >>> p, q = torch.tensor([[0.3, 0.4, 0.3]]).double(), torch.tensor([[0.6, 0.3, 0.1]]).double()
        >>> [round(float(discount(p, q, torch.tensor([[k]]).double())[0]), 4) for k in (1.0, 2.0, 3.0)]
        [1.0, 1.4, 1.75]
    """
    spare = torch.empty_like(p)
    low, high = torch.ones_like(k), k
    low_gap, high_gap = _gap(p, q, low, k, spare), _gap(p, q, high, k, spare)
    last = torch.zeros_like(k)
    on_host = p.device.type == "cpu"
    for round_ in range(ROUNDS if on_host else FIXED_ROUNDS):
        slope = high_gap - low_gap
        middle = torch.where(slope < 0, high - high_gap * (high - low) / slope, high).clamp(min=low, max=high)
        gap = _gap(p, q, middle, k, spare)
        over = gap <= 0
        # An end that stays twice counts half, or the other would creep towards the root alone (the Illinois rule).
        low, low_gap = (
            torch.where(over, low, middle),
            torch.where(over, torch.where(last > 0, low_gap / 2, low_gap), gap),
        )
        high, high_gap = (
            torch.where(over, middle, high),
            torch.where(over, gap, torch.where(last < 0, high_gap / 2, high_gap)),
        )
        last = torch.where(over, 1.0, -1.0).double()
        if on_host and round_ % 3 == 2 and bool(((high_gap > -CLOSE) | (high - low < CLOSE)).all()):
            break
    return high, _beta(p, q, high, spare)


def _gap(
    p: Float[Tensor, "n vocab"],
    q: Float[Tensor, "n vocab"],
    rho: Float[Tensor, "n 1"],
    k: Float[Tensor, "n 1"],
    spare: Float[Tensor, "n vocab"],
) -> Float[Tensor, "n 1"]:
    beta = _beta(p, q, rho, spare)
    return _any(beta, k) - rho * beta


def _any(beta: Float[Tensor, "n 1"], k: Float[Tensor, "n 1"]) -> Float[Tensor, "n 1"]:
    """Probability that any of k draws is accepted."""
    return -torch.expm1(k * torch.log1p(-beta))


def _beta(
    p: Float[Tensor, "n vocab"], q: Float[Tensor, "n vocab"], rho: Float[Tensor, "n 1"], spare: Float[Tensor, "n vocab"]
) -> Float[Tensor, "n 1"]:
    torch.minimum(torch.div(p, rho.to(p), out=spare), q, out=spare)
    return spare.sum(-1, keepdim=True).double().clamp(0, 1)
