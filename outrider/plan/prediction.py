"""What a way of decoding brings: tokens per step from a record, seconds per step from a cost table, and intervals."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from outrider.lengths.costs import CostTable, plain_seconds
from outrider.plan.record import DraftRows, RecordedRun, TargetText
from outrider.plan.tree_times import TreeTimes
from outrider.plan.ways import DraftConfiguration
from outrider.theory.coverage import begun

DRAWS = 400
"""Bootstrap samples of the prompts."""
TIME_ERROR, BUSY_TIME_ERROR = 0.05, 0.15
"""Standard errors of a step's predicted time, on an idle machine and on a busy one, beside that of how steady the
machine is."""
WANDERS = 2.0
"""How many times farther than in the seconds of a probe a machine's speed goes in minutes. Over 75 seconds the
logarithm of a step's seconds had a standard deviation of 0.16 to 0.20, and in probes one of 0.09 (two cores of an AMD
EPYC)."""
RATIO_ERROR, BUSY_RATIO_ERROR, FARTHER_ERROR = 0.05, 0.08, 0.07
"""Standard errors of the time of a step over that of a plain one, beside that of the repeats, and what is added for
numbers of requests that were not measured. Small steps slow down more than large ones: two tables that were measured
minutes apart differ by 8 %, of which their repeats explain 5."""
NORMAL = 1.645
"""Standard errors between the middle and the ends of an interval of 90 %."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """A number with an interval of 90 %."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The expected steps of a way on one text.

    Attributes:
        tokens: Tokens of the text.
        by_length: Expected steps that draft 0, 1, ... tokens deep.
    """

    tokens: int
    by_length: Float[np.ndarray, " lengths"]

    @classmethod
    def of(cls, way: DraftConfiguration, text: TargetText, rows: DraftRows) -> "Steps":
        """The expectation over all drafts and coins, by the chances that a step begins at each place."""
        count = len(text.tokens)
        chances = begun(way.survivals(text, rows), count)[:count]
        return cls(
            tokens=count,
            by_length=np.bincount(way.drafted(text, rows), weights=chances, minlength=way.length + 1),
        )


@dataclass(frozen=True, kw_only=True)
class PlanPrediction:
    """What a way brings for a number of requests that run at once.

    Attributes:
        way: The way.
        requests: How many requests.
        block_efficiency: Tokens per step of a request.
        seconds: Of a step, as the cost table says.
        tokens_per_second: Of all requests.
        latency: Seconds between the tokens of a request, on average (TPOT).
        speedup: Tokens per second over those of plain decoding.
        break_even: Block efficiency at which it would be as fast as plain decoding.
        break_even_acceptance: Acceptance of each draft token at which it would be; None if none is high enough.
        timed: Whether steps of this kind were timed. Times of other trees are extended from chains.
        notes: What to know about the figures.
    """

    way: DraftConfiguration
    requests: int
    block_efficiency: Range
    seconds: float
    tokens_per_second: Range
    latency: Range
    speedup: Range
    break_even: float
    break_even_acceptance: float | None
    timed: bool = True
    notes: tuple[str, ...] = ()


def expected_steps(record: RecordedRun, way: DraftConfiguration) -> list[Steps]:
    """The expected steps of each text. Plain decoding takes one per token."""
    if way.is_plain:
        return [Steps(tokens=len(text.tokens), by_length=np.array([float(len(text.tokens))])) for text in record.texts]
    return [Steps.of(way, text, rows) for text, rows in zip(record.texts, record.drafts[way.drafter], strict=True)]


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Predicts ways from one record and the costs of steps.

    Attributes:
        record: The recorded run.
        costs: The cost table with each drafter.
        trees: What steps of trees take.
        context: Tokens of a request; by default those of the record.
        estimated: Whether the costs are a formula's and not measured.
    """

    record: RecordedRun
    costs: Mapping[str, CostTable]
    trees: TreeTimes = field(default_factory=TreeTimes)
    context: int | None = None
    estimated: bool = False
    _steps: dict[DraftConfiguration, list[Steps]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def predict(self, way: DraftConfiguration, requests: int) -> PlanPrediction:
        """The prediction for so many requests at once."""
        steps = self.steps(way)
        weights = _resampled(len(steps))
        tokens = weights @ np.array([float(each.tokens) for each in steps])
        counts = weights @ np.stack([each.by_length for each in steps])
        seconds = self._seconds(way, requests)
        per_step = _mean_seconds(counts / counts.sum(1, keepdims=True), seconds, requests)
        tau, plain = tokens / counts.sum(1), self.plain_seconds(requests)
        more, notes = self._doubts(way, requests)
        doubtful = self.estimated or any(costs.busy for costs in self.costs.values())
        of_time = math.hypot(BUSY_TIME_ERROR if doubtful else TIME_ERROR, WANDERS * self.unsteady, more)
        of_ratio = math.hypot(BUSY_RATIO_ERROR if doubtful else RATIO_ERROR, more)
        slowness = self.slowness
        break_even = per_step[0] / plain
        return PlanPrediction(
            way=way,
            requests=requests,
            block_efficiency=_range(tau, 0.0),
            seconds=float(per_step[0] * slowness),
            tokens_per_second=_range(requests * tau / per_step / slowness, of_time),
            latency=_range(per_step * slowness / tau, of_time),
            speedup=Range(value=1.0, low=1.0, high=1.0) if way.is_plain else _range(tau / per_step * plain, of_ratio),
            break_even=float(break_even),
            break_even_acceptance=acceptance_for(float(break_even), way.length) if way.tree == "chain" else None,
            timed=way.tree == "chain" or way in self.trees.over_plain,
            notes=notes,
        )

    def steps(self, way: DraftConfiguration) -> list[Steps]:
        """The expected steps of a way on each text."""
        if way not in self._steps:
            self._steps[way] = expected_steps(self.record, way)
        return self._steps[way]

    def plain_seconds(self, requests: int) -> float:
        """Seconds of a plain step."""
        return plain_seconds(
            list(self.costs.values()), requests, sampled=self.record.temperature > 0, context=self._context
        )

    @property
    def slowness(self) -> float:
        """What steps take over what the tables say. The machine is faster in one minute than in the next, and the
        recorded run is as good a measurement of that as each table: the mean of all.
        """
        return 1.0 if self.estimated else math.exp(float(self._levels.mean()))

    @property
    def unsteady(self) -> float:
        """Standard deviation of the logarithm of how slow the machine was: while each table was measured, and from one
        measurement to the next.
        """
        within = statistics.median(table.unsteady for table in self.costs.values())
        return within if self.estimated else math.hypot(within, float(self._levels.std(ddof=1)))

    @property
    def _levels(self) -> Float[np.ndarray, " measurements"]:
        """Logarithms of plain steps over what the tables say: of each table, and of the recorded run."""
        plain = np.array([self._table(costs, 1, 1)[0, 0] for costs in self.costs.values()])
        return np.log([*(plain / self.plain_seconds(1)), self.record.slowness])

    def dearer(self, way: DraftConfiguration, requests: int) -> float:
        """Seconds of a step of a tree over those that chains tell; 1 if it was not timed. Between numbers of requests
        that were timed, it follows a line.
        """
        costs, sampled = self.costs[way.drafter], self.record.temperature > 0
        ratios = {}
        for b, over_plain in sorted(self.trees.over_plain.get(way, {}).items()):
            plain = costs.steps(b, sampled=sampled, context=costs.context, longest=1)[0][0]
            ratios[b] = over_plain * plain / costs.tree(b, way.widths, sampled=sampled, context=costs.context)
        return float(np.interp(requests, list(ratios), list(ratios.values()))) if ratios else 1.0

    def _seconds(self, way: DraftConfiguration, requests: int) -> Float[np.ndarray, "drafting lengths"]:
        """Seconds of a step by how many requests draft, and how deep."""
        if way.is_plain:
            return np.full((requests + 1, 1), self.plain_seconds(requests))
        costs = self.costs[way.drafter]
        seconds = self._table(costs, requests, way.length)
        plain = seconds[0, 0]
        if way.tree != "chain":
            dearer, sampled = self.dearer(way, requests), self.record.temperature > 0
            for depth in range(1, way.length + 1):
                seconds[:, depth] = dearer * costs.tree(
                    requests, way.widths[:depth], sampled=sampled, context=self._context
                )
        # Noise must not make a longer draft cheaper. All steps of a table were timed in turns, those of two were not.
        seconds = np.maximum.accumulate(np.maximum(seconds, plain), axis=1)
        return seconds * (self.plain_seconds(requests) / plain)

    def _table(self, costs: CostTable, requests: int, longest: int) -> Float[np.ndarray, "drafting lengths"]:
        return np.array(
            costs.steps(requests, sampled=self.record.temperature > 0, context=self._context, longest=longest)
        )

    @property
    def _context(self) -> int:
        return self.record.context if self.context is None else self.context

    def _doubts(self, way: DraftConfiguration, requests: int) -> tuple[float, tuple[str, ...]]:
        """The relative standard error of times that were not measured for such a step, and what to know of them."""
        notes: list[str] = []
        if self.estimated:
            notes.append("times are estimated from a roofline, not measured")
        if any(costs.busy for costs in self.costs.values()):
            notes.append("costs were measured on a busy machine")
        tables = list(self.costs.values()) if way.is_plain else [self.costs[way.drafter]]
        farther = any(requests > max(row.requests for row in each.rows) for each in tables)
        if way.tree != "chain":
            farther = farther or requests > max(self.trees.over_plain.get(way, {}), default=0)
        if farther:
            notes.append("the time of a step is extended from chains and batches that were measured")
        if way.certainty == "at least":
            notes.append("it accepts at least what is shown")
        doubt = max(each.doubt for each in tables)
        if way.tree != "chain":
            doubt = max(doubt, self.trees.doubt)
        return math.hypot(doubt, FARTHER_ERROR if farther else 0.0), tuple(notes)


def ranked(predictions: Sequence[PlanPrediction]) -> list[PlanPrediction]:
    """The best first, by the lower end of the speedup. Of those within 1 %, the least complicated.

    A tree whose steps were not timed does not come first, as long as there is another way: its costs are extended from
    chains, which flatters it.
    """
    left, order = sorted(predictions, key=lambda each: -each.speedup.low), list[PlanPrediction]()
    while left:
        open_ones = left if order else [each for each in left if each.timed] or left
        near = [each for each in open_ones if each.speedup.low >= 0.99 * open_ones[0].speedup.low]
        best = min(near, key=lambda each: each.way.effort)
        left.remove(best)
        order.append(best)
    return order


def acceptance_for(block_efficiency: float, length: int) -> float | None:
    r"""Acceptance of each token at which a chain emits so many per step: the root of $\sum_{i \le \gamma} a^i$.

    Example:
        >>> acceptance_for(1.75, 2), acceptance_for(4.0, 2)
        (0.5, None)
    """
    if length == 0 or block_efficiency > length + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(length + 1)) < block_efficiency else (low, middle)
    return round(high, 6)


def _mean_seconds(
    shares: Float[np.ndarray, "draws lengths"], seconds: Float[np.ndarray, "drafting lengths"], requests: int
) -> Float[np.ndarray, " draws"]:
    """Mean seconds of a step of requests whose draft lengths are independent; the longest one decides."""
    below = np.minimum(np.cumsum(shares, axis=1), 1.0) ** requests
    longest = np.diff(below, axis=1, prepend=0.0)
    nothing = shares[:, :1]
    drafting = requests * (1 - nothing) / np.maximum(1 - nothing**requests, 1e-12)
    places = np.arange(requests + 1)
    lengths = range(shares.shape[1])
    by_length = np.stack([np.interp(drafting[:, 0], places, seconds[:, n]) for n in lengths], axis=1)
    by_length[:, 0] = seconds[0, 0]
    return (longest * by_length).sum(1)


def _resampled(count: int) -> Float[np.ndarray, "draws prompts"]:
    """How often each prompt is drawn: all once, then bootstrap samples."""
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=DRAWS)
    return np.concatenate([np.ones((1, count)), drawn])


def _range(values: Float[np.ndarray, " draws"], error: float) -> Range:
    """The first value, and an interval from the others and a relative standard error beside them."""
    value = float(values[0])
    low, high = (float(each) for each in np.quantile(values[1:], [0.05, 0.95]))
    below = np.hypot(max(0.0, value - low), NORMAL * error * value)
    above = np.hypot(max(0.0, high - value), NORMAL * error * value)
    return Range(value=value, low=max(0.0, value - float(below)), high=value + float(above))
