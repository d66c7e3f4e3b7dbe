r"""What a head that guesses blocks minimises: a divergence per guess, and how much a guess at each depth counts."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from outrider.core.option import CheckedOptions, option
from outrider.learning.divergences import Divergence

Weighting = Literal["decay", "even", "survival"]
"""How much a guess counts: less with its depth, the same at every depth, or by how likely the guesses before it are
accepted.
"""
GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}
"""The decay that the paper uses, by the size of a block."""
FLOOR = 0.5
"""The $a$ of the weights by survival."""


@dataclass(frozen=True, kw_only=True)
class BlockLoss(CheckedOptions):
    r"""The loss of blocks: $(1 - s) D(p, q) + s\,\mathrm{CE}$ per guess, weighted.

    With `decay`, the guess at depth k counts $e^{-(k - 1) / \gamma}$; with `even`, 1. With `survival` (D-PACE), it
    counts $\sum_{j \ge k} \prod_{i \le j} r_i$, where $r_i = (1 - a)\,q(y_i) + a$ estimates from the head's own
    probability of the text's token whether guess i is accepted, and $a = 0.5$; guesses that count for nothing have
    $r_i = 1$.

    Attributes:
        of: The divergence from the target's rows; None is the cross-entropy of the text's own tokens.
        hard: $s$, the share of the cross-entropy beside a divergence.
        gamma: How slowly guesses count less with their depth.
        weighting: `decay`, `even` or `survival`.

    Raises:
        InputError: A number is out of range, or there is no such weighting.

    References:
        DFlash 2026, https://arxiv.org/abs/2602.06036; D-PACE 2026, https://arxiv.org/abs/2605.18810
    """

    of: Divergence | None = None
    hard: float = option(0.0, least=0, most=1)
    gamma: float = option(4.0, above=0, finite=False)
    weighting: str = option("decay", among=get_args(Weighting))

    @property
    def reads_labels(self) -> bool:
        """Whether anything depends on the head's probability of the text's own tokens."""
        return self.of is None or self.hard > 0 or self.weighting == "survival"

    def weights(
        self, log_q: Float[Tensor, "rows anchors depth"], valid: Bool[Tensor, "rows anchors depth"]
    ) -> Float[Tensor, "rows anchors depth"]:
        """How much each guess counts.

        Args:
            log_q: The head's log-probability of the text's token; 0 where a guess counts for nothing.
            valid: Which guesses count.

        Example:
            >>> one = torch.ones(1, 1, 3)
            >>> BlockLoss(gamma=1.0).weights(0 * one, one.bool())[0, 0]
            tensor([1.0000, 0.3679, 0.1353])
            >>> BlockLoss(weighting="survival").weights(0 * one, one.bool())[0, 0]
            tensor([3., 2., 1.])
        """
        if self.weighting == "even":
            return valid.to(log_q)
        if self.weighting == "decay":
            depth = torch.arange(log_q.shape[-1], device=log_q.device, dtype=log_q.dtype)
            return torch.exp(-depth / self.gamma) * valid
        survives = ((1 - FLOOR) * log_q.exp() + FLOOR).cumprod(-1)
        return survives.flip(-1).cumsum(-1).flip(-1) * valid


def usual_gamma(block_size: int) -> float:
    """The paper's decay for a size of block; half the size where the paper has none.

    Example:
        >>> usual_gamma(16), usual_gamma(7)
        (7.0, 3.5)
    """
    return GAMMAS.get(block_size, block_size / 2)
