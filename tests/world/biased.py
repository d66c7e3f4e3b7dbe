"""Verifiers that are wrong, as rules in public code have been. A checker that passes one is broken."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from outrider.core.dice import Dice, Purpose
from outrider.core.types import Draft, Verdict
from outrider.verifiers.protocol import chains, everyone, recover


@dataclass(frozen=True, kw_only=True)
class RecoversFromTheTarget:
    """Token verification that forgets the residual."""

    def verify(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Verdict:
        side = chains(draft, target_rows)
        accepted = np.zeros_like(side.lengths)
        for i in range(side.depth):
            alive = accepted == i
            accepted += alive & dice.accept(side.ratios[:, i].clip(max=1) * alive, everyone(draft, i, Purpose.ACCEPT))
        last = side.roots + accepted
        return side.verdict(accepted, recover(draft, dice, target_rows, last, np.zeros(len(last), dtype=bool)))


@dataclass(frozen=True, kw_only=True)
class ProductOfUniforms:
    """Compares the product of clipped ratios with a product of uniforms, then uses the plain residual (seen in public
    code as "block verify"). The product of uniforms is written as its law given earlier successes, coin by coin."""

    def verify(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Verdict:
        side = chains(draft, target_rows)
        clipped = side.ratios.clip(max=1).cumprod(-1)
        accepted = np.zeros_like(side.lengths)
        for i in range(side.depth):
            landed = dice.accept(clipped[:, i], everyone(draft, i, Purpose.ACCEPT))
            accepted = np.where(landed & (i < side.lengths), i + 1, accepted)
        last, rejected = side.roots + accepted, accepted < side.lengths
        return side.verdict(accepted, recover(draft, dice, target_rows, last, rejected))


@dataclass(frozen=True, kw_only=True)
class AcceptsEverything:
    """Takes the whole chain, and what the target draws behind it."""

    def verify(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Verdict:
        side = chains(draft, target_rows)
        last = torch.from_numpy(side.roots + side.lengths)
        return side.verdict(side.lengths, target_rows[last].argmax(-1))
