"""Lenient verification: accept more than the target's law allows, by a stated rule. Lossy."""

from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
from jaxtyping import Float
from torch import Tensor

from outrider.core.dice import Dice
from outrider.core.option import CheckedOptions, option
from outrider.core.types import Draft, Verdict
from outrider.verifiers.protocol import (
    Decision,
    chains,
    check_chains,
    child_rows,
    ratio,
    residual,
    upload,
)
from outrider.verifiers.token import one_by_one
from outrider.verifiers.traits import CHAINS, StatedVerifier
from outrider.verifiers.walk import JudgedNodes, decided, inner_nodes

Probabilities = TypeVar("Probabilities", Float[np.ndarray, "..."], Float[Tensor, "..."])


@dataclass(frozen=True, kw_only=True)
class LenientVerifier(CheckedOptions, StatedVerifier):
    r"""Token verification that accepts with probability $\min(1, f(p(x))/q(x))$; the residual stays $(p - q)_+$.

    `linear` is $f(p) = p/e$, where e is called lenience; `squared` is $p/e^2$; `exponential` is $p^e$. e is the field
    `strength`. At e = 1 all are lossless. A smaller e accepts more and moves the output further from the target's law.
    With `linear` no token becomes more than 1/e times as likely as the target has it. Since $f \ge p$, the residual of
    the modified rule is the plain one.

    References:
        Leviathan et al. 2023, appendix on lenience. https://arxiv.org/abs/2211.17192
        Zhou et al. 2023, DistillSpec, section 5. https://arxiv.org/abs/2310.08461
    """

    kinds = CHAINS
    lossy = True

    strength: float = option(0.5, above=0, most=1, note=" (1 is lossless)")
    family: Literal["linear", "squared", "exponential"] = "linear"

    def verify(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Verdict:
        if target_rows.device.type != "cpu":
            return self.decide(draft, target_rows, dice).verdict(draft)
        side = chains(draft, target_rows)
        return one_by_one(draft, target_rows, dice, side, self.loosened(side.p, side.q))

    def decide(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Decision:
        check_chains(draft)
        nodes = inner_nodes(draft)
        p = target_rows.index_select(0, upload(nodes, target_rows.device))
        q = child_rows(draft, nodes, p)
        x = draft.tokens[upload(nodes + 1, p.device)][:, None]
        chances = ratio(self._raised(p.gather(1, x).double()), q.gather(1, x))
        return decided(draft, target_rows, JudgedNodes(nodes=nodes, chances=chances, after=residual(p, q)), dice)

    def loosened(
        self, p: Float[np.ndarray, "requests depth"], q: Float[np.ndarray, "requests depth"]
    ) -> Float[np.ndarray, "requests depth"]:
        """f(p)/q, at most 1; 0 where p is 0."""
        return np.divide(self._raised(p), q, out=np.zeros_like(p), where=(p > 0) & (q > 0)).clip(max=1)

    def _raised(self, p: Probabilities) -> Probabilities:
        """f(p)."""
        e = self.strength
        if self.family == "linear":
            return p / e
        return p / e**2 if self.family == "squared" else p**e
