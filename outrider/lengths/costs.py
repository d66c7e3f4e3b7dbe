"""What steps cost, by number of requests and draft length, learnt from the seconds of an engine's own steps."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from outrider.lm.forwards.forward import BLOCK

RECENT = 9
"""Steps that say how slow the machine is now."""
NEW, GAIN = 3, 0.5
"""A cost of so few steps is their mean. Later it follows the median of each trial so far."""
CLIP = 1.5
"""Most that steps may seem too slow or too fast at once, as a logarithm."""
REFRESH = 32
"""Steps after which borrowed costs are worked out anew."""
CAP = 16
"""As how many steps a cost counts that was set."""
RECALLED = 1
"""As how many steps a cost counts that another process has learnt: it may have had other neighbours."""

REST = 1.0
"""Milliseconds of a step beside its forwards, before any step is seen."""

Kind = tuple[int, int]
"""A kind of step: its number of requests, and its deepest draft."""
Formula = Callable[[Kind], float]
"""The logarithm of what a kind of step costs about, before it is seen; in any unit."""
Times = tuple[float, float]
"""Milliseconds of a model's forwards over one token and over `BLOCK` tokens."""
Forwards = tuple[Times, Times]
"""The times of a target and of its draft model; zeros for a drafter that makes no forwards."""


@dataclass(kw_only=True)
class Cost:
    """The cost of a kind of step; changes in place.

    Attributes:
        log: Its logarithm. The unit is the same for all kinds, and is no second.
        count: Steps that it was learnt from; 0 means that `log` is not used.
        last: Number of the newest step of this kind; 0 if this process has made none.
    """

    log: float = 0.0
    count: int = 0
    last: int = 0


class StepCosts:
    r"""The costs of all kinds of steps; changes in place.

    A step takes its cost times how slow the machine is now. Contexts grow and other processes come and go, which slows
    steps of all lengths alike. So the slowness is the median of seconds over cost, over the last few steps of the usual
    length. A trial of another length tells how its cost compares. The usual length's own cost stays: only comparisons
    count. Single slow steps move nothing much. The first step of a kind in a process says nothing, because it may
    compile something.

    A cost that was never seen is borrowed from the nearest one that was, in proportion to a formula.

    Attributes:
        num_steps: Steps so far.

    Args:
        formula: By default a rough one; see `of_forwards`.
    """

    def __init__(self, formula: Formula | None = None) -> None:
        self._formula = formula or rough
        self.num_steps = 0
        self._costs: dict[Kind, Cost] = {}
        self._slowness: deque[float] = deque(maxlen=RECENT)
        self._tried: list[tuple[Kind, float]] = []
        self._tables: dict[int, list[float]] = {}

    def set(self, num_requests: int, length: int, cost: float, count: int = CAP) -> None:
        """Set a cost, as if it had been learnt from so many steps."""
        if not 0 < cost < math.inf or min(num_requests, length + 1, count) < 1:
            raise ValueError(f"no cost of a step: {(num_requests, length, cost, count)}")
        self._costs[coarse(num_requests), length] = Cost(log=math.log(cost), count=count)
        self._tables.clear()

    def rows(self) -> list[tuple[int, int, float, int]]:
        """All that was learnt: number of requests, length, cost, and number of steps."""
        return [(*kind, math.exp(cost.log), cost.count) for kind, cost in self._costs.items() if cost.count]

    def table(self, num_requests: int, most: int) -> Sequence[float]:
        """The costs of steps with drafts of 0, 1, ... tokens, at least up to `most`. Valid until the next step."""
        rows = coarse(num_requests)
        found = self._tables.get(rows, [])
        if len(found) <= most:
            found = self._tables[rows] = [math.exp(self._log((rows, length))) for length in range(most + 1)]
        return found

    @property
    def paced(self) -> bool:
        """Whether enough steps have said how slow the machine is now."""
        return len(self._slowness) >= NEW

    def last(self, num_requests: int, length: int) -> int:
        """Number of the newest step of a kind; 0 if this process has made none."""
        cost = self._costs.get((coarse(num_requests), length))
        return 0 if cost is None else cost.last

    def over(self, num_requests: int, length: int, seconds: float) -> float:
        """How much more than its cost a step took, as a logarithm."""
        if not self._slowness:
            return 0.0
        return math.log(seconds) - self._log((coarse(num_requests), length)) - median(self._slowness)

    def pass_by(self, num_requests: int, length: int) -> None:
        """Count a step without learning from it."""
        self.num_steps += 1
        self._costs.setdefault((coarse(num_requests), length), Cost()).last = self.num_steps
        if self.num_steps % REFRESH == 0:
            self._tables.clear()

    def learn(self, num_requests: int, length: int, seconds: float, trial: bool, ends: bool) -> None:
        """Learn from a step.

        Args:
            trial: Whether the step tried another length than the usual one.
            ends: Whether it is the last one of its trial.
        """
        kind = coarse(num_requests), length
        known, over = self._log(kind), self.over(num_requests, length, seconds)
        cost = self._costs.setdefault(kind, Cost())
        if not self._slowness or (not trial and cost.count >= NEW):
            self._slowness.append(math.log(seconds) - known)
        if cost.count < NEW:
            self._move(kind, known, over / (cost.count + 1))
        elif trial:
            self._tried.append((kind, over))
            if ends:
                self._move(kind, known, GAIN * median(each for tried, each in self._tried if tried == kind))
        if ends or not trial:
            self._tried.clear()

    def _move(self, kind: Kind, known: float, by: float) -> None:
        """Move a cost from what it was."""
        cost = self._costs[kind]
        cost.log, cost.count = known + min(max(by, -CLIP), CLIP), cost.count + 1
        table = self._tables.get(kind[0], [])
        if kind[1] < len(table):
            table[kind[1]] = math.exp(cost.log)

    def _log(self, kind: Kind) -> float:
        """The logarithm of a cost: learnt, or borrowed."""
        own = self._costs.get(kind)
        if own is not None and own.count:
            return own.log
        learnt = [other for other, cost in self._costs.items() if cost.count]
        if not learnt:
            return self._formula(kind)
        nearest = min(learnt, key=lambda other: _distance(other, kind))
        return self._formula(kind) + self._costs[nearest].log - self._formula(nearest)


def coarse(num_requests: int) -> int:
    """Numbers of requests that share a cost: all below 16 differ, larger ones keep four leading bits.

    Example:
        >>> [coarse(number) for number in (1, 15, 16, 17, 100)]
        [1, 15, 16, 16, 96]
    """
    low = max(0, num_requests.bit_length() - 4)
    return num_requests >> low << low


def rough(kind: Kind) -> float:
    """The logarithm of a rough cost, that of small models on a CPU."""
    requests, length = kind
    return math.log1p(0.04 * (requests - 1)) + math.log1p(length * (0.12 + 0.03 * requests))


def of_forwards(target: Times, draft: Times) -> Formula:
    """A formula from the times of forwards: a line through those of one token and of a block.

    Example:
        >>> formula = of_forwards((3.0, 8.0), (0.5, 1.0))
        >>> round(math.exp(formula((1, 0))), 2), round(math.exp(formula((2, 3))), 2)
        (4.0, 12.8)
    """

    def milliseconds(times: Times, tokens: int) -> float:
        one, block = times
        return one + max(0.0, block - one) / (BLOCK - 1) * (tokens - 1)

    def formula(kind: Kind) -> float:
        requests, length = kind
        return math.log(REST + milliseconds(target, requests * (length + 1)) + length * milliseconds(draft, requests))

    return formula


def _distance(one: Kind, other: Kind) -> float:
    """How little one kind of step says of another. Plain steps say little of drafts."""
    between = abs(math.log2(one[0] / other[0])) + abs(one[1] - other[1]) / 2
    return between + ((one[1] == 0) != (other[1] == 0))
