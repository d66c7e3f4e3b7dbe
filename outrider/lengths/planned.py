"""Planned length: the one with the most tokens per second, by measured costs and the request's own acceptance."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from outrider.core.option import CheckedOptions, option
from outrider.core.types import Step
from outrider.trees.protocol import Level


@dataclass(frozen=True, kw_only=True)
class PlannedState:
    """Decayed counts of accepted and of tested tokens. A rejected token is tested; the tokens behind it are not."""

    accepted: float
    tested: float


@dataclass(frozen=True, kw_only=True)
class PlannedLength(CheckedOptions):
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

    draft_cost: float = option(0.15, least=0)
    token_cost: float = option(0.02, least=0)
    most: int = option(16, least=1)
    acceptance: float = option(0.7, least=0, most=1)
    prior: float = option(10.0, above=0)
    decay: float = option(0.95, above=0, most=1)

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
