"""Planned length: the one with the most tokens per second, by measured costs and the request's own acceptance."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from outrider.core.types import InputError, Step
from outrider.trees.protocol import Level


@dataclass(frozen=True, kw_only=True)
class PlannedState:
    """Decayed counts of accepted and of tested tokens. A rejected token is tested; the tokens behind it are not."""

    accepted: float
    tested: float


@dataclass(frozen=True, kw_only=True)
class PlannedLength:
    r"""Draft the length $\gamma$ that maximises $(1 + a + \ldots + a^\gamma) / (1 + \gamma (c + v))$.

    a is the request's acceptance rate so far. Each step weighs `decay` times as much as the next one. Costs are in
    units of a target forward over one token; `outrider.bench.costs` measures them. They are fixed numbers that depend
    neither on a clock nor on the number of requests, so that a request's tokens depend on its seed alone. Measure them
    for your usual batch: in a full batch each extra token costs more, and shorter drafts are best. The defaults are for
    a single request.

    Attributes:
        draft_cost: c, the cost of one drafter call.
        token_cost: v, the cost that one more token adds to the target's forward.
        acceptance: a of a new request, with the weight of `prior` tokens.

    References:
        Leviathan et al. 2023, section 3.5. https://arxiv.org/abs/2211.17192
        Yan et al. 2024, decoding speculative decoding. https://arxiv.org/abs/2402.01528
    """

    constant: ClassVar[bool] = False
    known_ahead: ClassVar[bool] = True
    lossy = None

    draft_cost: float = 0.15
    token_cost: float = 0.02
    most: int = 16
    acceptance: float = 0.7
    prior: float = 10.0
    decay: float = 0.95

    def __post_init__(self) -> None:
        if self.draft_cost < 0 or self.token_cost < 0 or self.most < 1 or self.prior <= 0:
            raise InputError(
                "draft_cost and token_cost must be >= 0, most >= 1 and prior > 0, got "
                f"{self.draft_cost}, {self.token_cost}, {self.most} and {self.prior}"
            )
        if not 0 <= self.acceptance <= 1 or not 0 < self.decay <= 1:
            raise InputError(
                f"acceptance must be in [0, 1] and decay in (0, 1], got {self.acceptance} and {self.decay}"
            )

    def open(self) -> PlannedState:
        return PlannedState(accepted=self.acceptance * self.prior, tested=self.prior)

    def limit(self, state: object) -> int:
        current = _planned_state(state)
        gamma = np.arange(1, self.most + 1)
        tokens = 1 + np.cumsum((current.accepted / current.tested) ** gamma)
        return int(gamma[np.argmax(tokens / (1 + gamma * (self.draft_cost + self.token_cost)))])

    def reach(self, states: Sequence[object], level: Level) -> None:
        return None

    def update(self, state: object, step: Step) -> PlannedState:
        current = _planned_state(state)
        tested = min(step.num_accepted_tokens + 1, step.num_draft_tokens)
        return PlannedState(
            accepted=self.decay * current.accepted + step.num_accepted_tokens,
            tested=self.decay * current.tested + tested,
        )


def _planned_state(state: object) -> PlannedState:
    if not isinstance(state, PlannedState):
        raise TypeError(f"planned keeps a PlannedState, got {type(state).__name__}")
    return state
