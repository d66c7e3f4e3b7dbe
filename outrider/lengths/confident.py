"""DSpark's rule: stop drafting where the drafter itself finds acceptance unlikely."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Int

from outrider.core.option import CheckedOptions, option
from outrider.core.types import Step
from outrider.trees.protocol import Level


@dataclass(frozen=True, kw_only=True)
class ConfidentLength(CheckedOptions):
    r"""Stop before a token whose survival is below a threshold. A step drafts at least one token.

    The drafter estimates for each guess $c_k$, the probability that a token drawn from it is accepted if all before it
    are. The survival is $\prod_{i \le k} c_i$. It is known before the token is drawn, and depends on the tokens before
    it alone, so that the law stays the target's.

    Attributes:
        num_speculative_tokens: Longest draft.
        threshold: Least survival of a token that is drafted.

    References:
        DeepSeek 2026, DSpark. https://arxiv.org/abs/2607.05147
    """

    constant: ClassVar[bool] = False
    reads_survival: ClassVar[bool] = True
    lossy = None

    num_speculative_tokens: int = option(16, least=1)
    threshold: float = option(0.3, least=0, most=1)

    def open(self) -> None:
        return None

    def limit(self, state: object) -> int:
        return self.num_speculative_tokens

    def reach(self, states: Sequence[object], level: Level) -> Int[np.ndarray, " n"] | None:
        if level.depth == 0 or level.survival is None:
            return None
        return np.where(level.survival.cpu().numpy() < self.threshold, 0, self.num_speculative_tokens)

    def update(self, state: object, step: Step) -> None:
        return None
