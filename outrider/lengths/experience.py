"""What an engine has learnt of its own steps: their costs, the acceptance of drafts, and what trials may cost."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from outrider.host import remembered
from outrider.host.cores import Usage, crowded, shares
from outrider.lengths.costs import CAP, GAIN, RECALLED, Formula, Forwards, StepCosts, of_forwards, rough

RECORD = "step-costs"
"""The kind of record that keeps costs between processes."""
DECAY = 0.98
"""Weight of earlier steps in the counts of acceptance, per step."""
PRIOR, WEIGHT = 0.6, 4.0
"""Acceptance before any is seen, and the weight of an expectation in tokens."""
LONG_REST = 8
"""After so many plain steps a drafter has much to catch up on, and the time of its first draft says little."""
MOST_OVER = 3.0
"""Most that a step may seem too slow, as a logarithm, when a trial pays for it."""
ALLOWANCE, START, MOST_CREDIT = 0.005, 2.0, 4.0
"""Share of the time that trials may take; the time in reserve at first, and at most, in plain steps."""
CATCHING_UP = 2.0
"""Cost of the first draft after a long rest, before any is seen, beyond that of other drafts."""
TRIAL = 4
"""Steps of a trial."""
DEAREST = 16.0
"""Most that a trial is expected to cost, in steps of the usual length: only trials show that a cost is far too high."""
STRANGE = 4.0
"""By what factor a kept cost may differ from the formula, more or less than the others do."""
SAVE = 1024
"""Most steps after which costs are saved again."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The draft length of all requests of a step.

    Attributes:
        length: Deepest draft.
        usual: The length that seems best. Another `length` is a trial, to learn what it costs.
        worth: What the usual length would cost for as many tokens as a step of the trial is expected to bring.
        price: What the next trial is expected to cost more than its worth.
    """

    length: int
    usual: int
    worth: float = 0.0
    price: float = 0.0

    @property
    def trial(self) -> bool:
        """Whether it was chosen to learn something."""
        return self.length != self.usual


class Experience:
    """Costs of steps and acceptance of drafts, learnt while an engine runs. An engine owns it; it changes in place.

    Acceptance is counted by depth, over recent steps of all requests: the share of drafts accepted down to a depth that
    go on to the next. A drafter that proposes nothing there counts as a rejection.

    Every step that is no trial earns a share of its cost, and a trial spends what it costs more than the usual length
    for the same tokens. So trials take at most this share of the time.

    Attributes:
        costs: What steps cost.
        credit: What trials may still cost.
        trial: The length that is being tried.
        trial_left: Steps that the trial still takes.
        free: Whether the trial is not paid for.
        rested: Plain steps since the last draft.
        resting: Whether a plain step seemed best in the last step.
        catching_up: What the first draft after a long rest costs more than others.

    Args:
        clocked: Whether costs follow seconds. Otherwise choices depend on counts alone, so that they repeat.
        key: Under which costs are kept between processes; None keeps none.
        formula: What steps cost before any is seen; by default a rough formula.
    """

    def __init__(
        self, *, clocked: bool = True, key: Mapping[str, Any] | None = None, formula: Formula | None = None
    ) -> None:
        self.costs = StepCosts(formula)
        self.clocked = clocked
        self.key = key
        self.credit = START
        self.trial = 0
        self.trial_left = 0
        self.free = False
        self.rested = 0
        self.resting = False
        self.catching_up = CATCHING_UP
        self._tested: list[float] = []
        self._accepted: list[float] = []
        self._tokens: list[float] = []
        self._next_save = CAP
        self._began = Usage.now()

    @classmethod
    def recalled(cls, key: Mapping[str, Any], forwards: Forwards | None = None) -> "Experience":
        """With the costs that an earlier process kept under this key, if any. It keeps its own there too.

        Costs that are far from the others, by the formula, are left out: something disturbed the steps that taught
        them, and a draft that seems far too dear is not tried for a long time.

        Args:
            forwards: The times of forwards, from which other costs follow; None means a rough formula.
        """
        formula = None if forwards is None else of_forwards(*forwards)
        own, kept = cls(key=key, formula=formula), remembered.read(RECORD, key)
        if kept is None:
            return own
        try:
            own.catching_up = max(0.0, float(kept["catching_up"]))
            rows = [(int(n), int(length), float(cost), int(count)) for n, length, cost, count in kept["costs"]]
            for n, length, cost, count in _plausible(rows, formula or rough):
                own.costs.set(n, length, cost, count=min(count, RECALLED))
        except (KeyError, TypeError, ValueError, OverflowError):
            return cls(key=key, formula=formula)
        return own

    def save(self) -> None:
        """Keep the costs for later processes, unless other processes took the cores meanwhile."""
        if self.key is not None and not crowded(shares(self._began, Usage.now()), torch.get_num_threads()):
            remembered.write(RECORD, self.key, {"catching_up": self.catching_up, "costs": self.costs.rows()})

    def tokens(self, most: int) -> Sequence[float]:
        r"""Tokens that a request is expected to emit in a step with drafts of 0, 1, ... tokens, at least up to `most`.

        $1 + \sum_{j \le \gamma} \prod_{i \le j} a_i$ with $a_i$ the acceptance at depth i. Few counts at a depth lean
        on the counts of all depths.
        """
        if len(self._tokens) <= most:
            overall = (sum(self._accepted) + WEIGHT * PRIOR) / (sum(self._tested) + WEIGHT)
            self._tokens, reach = [1.0], 1.0
            for depth in range(most):
                accepted = tested = 0.0
                if depth < len(self._tested):
                    accepted, tested = self._accepted[depth], self._tested[depth]
                reach *= (accepted + WEIGHT * overall) / (tested + WEIGHT)
                self._tokens.append(self._tokens[-1] + reach)
        return self._tokens

    def plain_unknown(self, num_requests: int, usual: int) -> bool:
        """Whether this process has drafted for so many requests and never tried a plain step of as many."""
        last = self.costs.last
        return self.clocked and self.costs.paced and last(num_requests, 0) == 0 < last(num_requests, usual)

    def note(
        self, choice: Choice, rooms: Sequence[int], accepted: Sequence[int], seconds: float, ordinary: bool = True
    ) -> None:
        """Learn from a step.

        Args:
            rooms: Deepest draft that each request could make.
            accepted: Accepted draft tokens of each request.
            seconds: How long the step took.
            ordinary: Whether it did nothing but draft and verify, no prefill.
        """
        length, requests = max(rooms), len(rooms)
        first = self.costs.last(requests, length) == 0
        late = length > 0 and self.rested >= LONG_REST
        self._count(rooms, accepted, length)
        self._go_on(choice)
        known, over = self.costs.table(requests, length)[length], 0.0
        if self.clocked and ordinary and seconds > 0:
            over = self.costs.over(requests, length, seconds)
            # The first step of a kind may take longer than others, but not less.
            over = over if late or not first else min(over, 0.0)
            if not first and not late:
                self.costs.learn(requests, length, seconds, choice.trial, ends=self.trial_left == 0)
        cost = known * math.exp(min(over, MOST_OVER))
        if late:
            self.catching_up += GAIN * (max(0.0, cost - known) - self.catching_up)
        self._account(choice, cost)
        self.costs.pass_by(requests, length)
        self.rested, self.resting = 0 if length else self.rested + 1, choice.usual == 0
        if self.costs.num_steps >= self._next_save:
            self._next_save += min(self._next_save, SAVE)
            self.save()

    def _go_on(self, choice: Choice) -> None:
        """Begin, go on with or end a trial."""
        if not choice.trial:
            self.trial_left = 0
        elif self.trial_left and self.trial == choice.length:
            self.trial_left -= 1
        else:
            self.trial, self.trial_left, self.free = choice.length, TRIAL - 1, choice.worth == math.inf

    def _account(self, choice: Choice, cost: float) -> None:
        """Earn the share of a step, or pay for a step of a trial."""
        if choice.trial:
            self.credit -= max(0.0, cost - choice.worth)
        else:
            most = max(self.credit, choice.price, MOST_CREDIT * cost)
            self.credit = min(self.credit + ALLOWANCE * cost, most)

    def _count(self, rooms: Sequence[int], accepted: Sequence[int], deepest: int) -> None:
        """Count tested and accepted tokens by depth."""
        if deepest == 0:
            return
        more = [0.0] * (deepest - len(self._tested))
        self._tested = [DECAY * count for count in self._tested] + more
        self._accepted = [DECAY * count for count in self._accepted] + more
        self._tokens = []
        for room, kept in zip(rooms, accepted, strict=True):
            for depth in range(min(kept + 1, room)):
                self._tested[depth] += 1
            for depth in range(kept):
                self._accepted[depth] += 1


def _plausible(rows: Sequence[tuple[int, int, float, int]], formula: Formula) -> list[tuple[int, int, float, int]]:
    """The rows of costs that differ from the formula about as much as the others do."""
    offsets = [math.log(cost) - formula((requests, length)) for requests, length, cost, _ in rows]
    middle = median(offsets) if offsets else 0.0
    return [row for row, offset in zip(rows, offsets, strict=True) if abs(offset - middle) <= math.log(STRANGE)]
