"""Coupled: match, with one noise for the draft's and the target's token at a position (Daliri et al. 2024)."""

from dataclasses import dataclass
from typing import ClassVar

from outrider.verifiers.match import MatchVerifier


@dataclass(frozen=True, kw_only=True)
class CoupledVerifier(MatchVerifier):
    r"""Emit $\arg\max_x \ln p(x) + G_t(x)$ at position t, and go on while that token is in the draft.

    The noise $G_t$ is keyed by the request's seed and the position (`CoupledDice`). So an output depends on the seed
    and the target alone, up to roundings: not on the drafter, the tree, the length, the batch, or on whether anything
    is drafted. The draft's tokens are drawn with the same noise, which makes them agree more often than independent
    draws would. Every $G_t$ decides one emitted token, so the law is the target's however the draft was made.

    References:
        Daliri et al. 2024, drafter-invariant speculative decoding. https://arxiv.org/abs/2408.07978
    """

    shares_noise: ClassVar[bool] = True
