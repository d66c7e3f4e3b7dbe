"""AdaEDL: stop drafting where the entropy says that acceptance is unlikely; the threshold adapts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Int

from outrider.core.option import CheckedOptions, option
from outrider.core.types import Step
from outrider.lengths.entropy import entropies
from outrider.trees.protocol import Level


@dataclass(frozen=True, kw_only=True)
class AdaedlState:
    """The running acceptance rate and the threshold."""

    rate: float
    threshold: float


@dataclass(frozen=True, kw_only=True)
class AdaedlLength(CheckedOptions):
    r"""Stop before a token if $1 - \sqrt{\gamma H} < \lambda$, with H the entropy of the draft's row in nats.

    After a step with d drafted and a accepted tokens the rate becomes $\beta_1 r + (1 - \beta_1) a/d$, and $\lambda$
    moves by $\beta_2$ towards $\lambda + \epsilon$ if the rate is below the target rate, else, unless all of the
    longest draft was accepted, towards $\lambda - \epsilon$. A step drafts at least one token.

    Attributes:
        num_speculative_tokens: Longest draft.
        gamma: $\gamma$, which replaces an unknown cross term of the bound.
        threshold: $\lambda$ of a new request.
        target_rate: Acceptance rate that the threshold steers to.
        epsilon: $\epsilon$.
        rate_decay: $\beta_1$.
        threshold_decay: $\beta_2$.

    References:
        Agrawal et al. 2024, AdaEDL. https://arxiv.org/abs/2410.18351
    """

    constant: ClassVar[bool] = False
    lossy = None

    num_speculative_tokens: int = option(16, least=1)
    gamma: float = option(0.2, above=0)
    threshold: float = 0.4
    target_rate: float = option(0.9, least=0, most=1)
    epsilon: float = 0.01
    rate_decay: float = option(0.5, least=0, most=1)
    threshold_decay: float = option(0.9, least=0, most=1)

    def open(self) -> AdaedlState:
        return AdaedlState(rate=self.target_rate, threshold=self.threshold)

    def limit(self, state: object) -> int:
        return self.num_speculative_tokens

    def reach(self, states: Sequence[object], level: Level) -> Int[np.ndarray, " n"] | None:
        if level.depth == 0:
            return None
        bound = 1 - np.sqrt(self.gamma * entropies(level))
        thresholds = np.array([_adaedl_state(states[owner]).threshold for owner in level.owners.tolist()])
        return np.where(bound < thresholds, 0, self.num_speculative_tokens)

    def update(self, state: object, step: Step) -> AdaedlState:
        current = _adaedl_state(state)
        drafted, accepted = step.num_draft_tokens, step.num_accepted_tokens
        if drafted == 0:
            return current
        rate = self.rate_decay * current.rate + (1 - self.rate_decay) * accepted / drafted
        aim = current.threshold
        if rate < self.target_rate:
            aim += self.epsilon
        elif accepted != self.num_speculative_tokens:
            aim -= self.epsilon
        decay = self.threshold_decay
        return AdaedlState(rate=rate, threshold=decay * current.threshold + (1 - decay) * aim)


def _adaedl_state(state: object) -> AdaedlState:
    if not isinstance(state, AdaedlState):
        raise TypeError(f"adaedl keeps an AdaedlState, got {type(state).__name__}")
    return state
