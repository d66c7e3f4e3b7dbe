"""Goodput: one length for the whole batch, the one with the most tokens per second; none where no draft pays."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from outrider.core.types import InputError, Step
from outrider.lengths.costs import Forwards
from outrider.lengths.experience import DEAREST, TRIAL, Choice, Experience
from outrider.trees.protocol import Level


@dataclass(frozen=True, kw_only=True)
class GoodputLength:
    r"""Draft the length $\gamma \ge 0$ that maximises $E(\gamma) / t(b, \gamma)$ for the b requests of the step.

    $E$ is the expected number of tokens and $t$ the cost of a step, both as the engine has learnt them from its own
    steps (`Experience`). A step with $\gamma = 0$ is a step of plain decoding: the drafter is not called, and a draft
    model does not read along. Lengths that seem worse are tried from time to time, which costs about half a percent.
    Plain steps are tried once for each number of requests, free of charge: no choice may be slower than they are.

    The choice is made before drafting, from earlier steps and from the clock, so the law is kept. It depends on the
    machine and on all requests of the batch. So a seed does not repeat an output above temperature 0, unless requests
    with a seed draft a length of their own, `seeded`.

    Attributes:
        most: Longest draft.
        margin: How much faster than plain decoding drafts must seem before they begin again, as a share.
        seeded: Draft length of requests that come with a seed and a temperature above 0; None: the chosen length.

    References:
        Liu et al. 2024, SmartSpec: optimizing speculative decoding for serving by goodput.
        https://arxiv.org/abs/2406.14066
    """

    constant: ClassVar[bool] = False
    known_ahead: ClassVar[bool] = True
    lossy = None

    most: int = 8
    margin: float = 0.05
    seeded: int | None = None

    def __post_init__(self) -> None:
        if self.most < 1 or self.margin < 0:
            raise InputError(f"most must be >= 1 and margin >= 0, got {self.most} and {self.margin}")
        if self.seeded is not None and self.seeded < 0:
            raise InputError(f"seeded must be >= 0, got {self.seeded}")

    def open(self) -> None:
        return None

    def limit(self, state: object) -> int:
        return max(self.most, self.seeded or 0)

    def reach(self, states: Sequence[object], level: Level) -> None:
        return None

    def update(self, state: object, step: Step) -> None:
        return None

    def recalled(self, key: Mapping[str, Any], forwards: Forwards | None = None) -> Experience:
        return Experience.recalled(key, forwards)

    def choose(self, experience: Experience, num_requests: int) -> Choice:
        costs, tokens = experience.costs.table(num_requests, self.most), experience.tokens(self.most)
        best = max(range(1, self.most + 1), key=lambda length: tokens[length] / costs[length])
        gain = tokens[best] * costs[0] / costs[best] - 1
        usual = best if gain > (self.margin if experience.resting else 0) else 0
        going_on = experience.trial_left > 0 and usual != experience.trial <= self.most
        if not going_on and usual and experience.plain_unknown(num_requests, usual):
            return Choice(length=0, usual=usual, worth=math.inf)
        if going_on:
            other = experience.trial
        else:
            others = [length for length in (best, 0, best + 1, best - 1) if length != usual and length <= self.most]
            other = min(others, key=lambda length: experience.costs.last(num_requests, length))
        worth = math.inf if going_on and experience.free else tokens[other] * costs[usual] / tokens[usual]
        # A length that seems about as good is tried no more often than one that is a tenth worse.
        price = TRIAL * max(costs[other] - worth, costs[other] / 10) + (usual == 0) * experience.catching_up
        price = min(price, DEAREST * costs[usual])
        if going_on or experience.credit >= price:
            return Choice(length=other, usual=usual, worth=worth)
        return Choice(length=usual, usual=usual, price=price)
