"""Token verification: accept draft tokens one by one (Leviathan et al. 2023; Chen et al. 2023)."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from torch import Tensor

from outrider.core.dice import Dice, Purpose
from outrider.core.types import Draft, Verdict
from outrider.verifiers.protocol import (
    Chains,
    Decision,
    chains,
    check_chains,
    child_rows,
    everyone,
    ratio,
    recover,
    residual,
    upload,
)
from outrider.verifiers.traits import CHAINS, StatedVerifier
from outrider.verifiers.walk import JudgedNodes, decided, inner_nodes


@dataclass(frozen=True, kw_only=True)
class TokenVerifier(StatedVerifier):
    r"""Accept the i-th token with probability $\min(1, p(x_i)/q(x_i))$; stop at the first rejection.

    The rejected token is replaced by a draw from the residual $\max(0, p - q)$; after no rejection a bonus token is
    drawn from $p$. A chosen token is a point mass: it is accepted with probability $p(x)$.

    References:
        Leviathan et al. 2023, algorithm 1. https://arxiv.org/abs/2211.17192
        Chen et al. 2023, algorithm 2. https://arxiv.org/abs/2302.01318
    """

    kinds = CHAINS
    takes_likeliest = True

    def verify(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Verdict:
        if target_rows.device.type != "cpu":
            return self.decide(draft, target_rows, dice).verdict(draft)
        side = chains(draft, target_rows)
        return one_by_one(draft, target_rows, dice, side, side.ratios)

    def decide(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Decision:
        check_chains(draft)
        nodes = inner_nodes(draft)
        p = target_rows.index_select(0, upload(nodes, target_rows.device))
        q = child_rows(draft, nodes, p)
        x = draft.tokens[upload(nodes + 1, p.device)][:, None]
        judged = JudgedNodes(nodes=nodes, chances=ratio(p.gather(1, x), q.gather(1, x)), after=residual(p, q))
        return decided(draft, target_rows, judged, dice)


def one_by_one(
    draft: Draft,
    target_rows: Float[Tensor, "nodes vocab"],
    dice: Dice,
    side: Chains,
    chances: Float[np.ndarray, "requests depth"],
) -> Verdict:
    """Accept the i-th token of each chain by its chance, stop at the first rejection, and draw one more token."""
    num_accepted = np.zeros_like(side.lengths)
    for i in range(side.depth):
        alive = num_accepted == i
        num_accepted += alive & dice.accept(chances[:, i] * alive, everyone(draft, i, Purpose.ACCEPT))
    last, rejected = side.roots + num_accepted, num_accepted < side.lengths
    return side.verdict(num_accepted, recover(draft, dice, target_rows, last, rejected))
