"""Verifiers that do not keep the target's law, for servers that a proof must refuse."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from torch import Tensor

from outrider.core.dice import Dice, Purpose
from outrider.core.types import Draft, Verdict
from outrider.verifiers.protocol import chains, everyone, recover
from outrider.verifiers.token import TokenVerifier


@dataclass(frozen=True, kw_only=True)
class DrawsAgain(TokenVerifier):
    """Replaces a rejected token by a draw from the target's row, not from the residual."""

    def verify(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Verdict:
        side = chains(draft, target_rows)
        ratios, num_accepted = side.ratios, np.zeros_like(side.lengths)
        for i in range(side.depth):
            alive = num_accepted == i
            num_accepted += alive & dice.accept(ratios[:, i] * alive, everyone(draft, i, Purpose.ACCEPT))
        last = side.roots + num_accepted
        return side.verdict(num_accepted, recover(draft, dice, target_rows, last, np.zeros(len(last), dtype=bool)))


@dataclass(frozen=True, kw_only=True)
class AcceptsEverything(TokenVerifier):
    """Accepts every draft token."""

    takes_likeliest = False

    def verify(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Verdict:
        side = chains(draft, target_rows)
        last = side.roots + side.lengths
        return side.verdict(side.lengths, recover(draft, dice, target_rows, last, np.zeros(len(last), dtype=bool)))
