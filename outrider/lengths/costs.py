"""What steps cost on this machine: measured rows, and the cost of any step between them. A plain value."""

import bisect
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from statistics import NormalDist
from typing import Any

import numpy as np
from jaxtyping import Float

Steps = Float[np.ndarray, "drafting lengths"]
"""Seconds of a step: `steps[m, n]` where m requests draft n tokens each; `steps[0]` is plain throughout."""
Lines = dict[int, Float[np.ndarray, " lengths"]]
"""Values by length, for ascending numbers of requests."""
PARTS = ("target", "drafter", "rest")
"""What a step consists of: fields of `StepCost`."""
CHANCE = 0.05
"""Drafts are made unless a gain is less likely by acceptance. By the errors of the costs a loss must be less likely."""
Z_SCORE = NormalDist().inv_cdf(1 - CHANCE)
"""So many standard errors of the costs drafts must gain: 1.645."""
LEAST_DOUBT = 0.04
"""Least standard error of costs: measurements that were made minutes apart differ by more than their repeats."""
USUAL = 16
"""Lengths of drafts whose costs are worked out together."""


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """What one kind of step takes, in seconds: its median repeat.

    Attributes:
        requests: Number of requests, all alike.
        length: Draft tokens of each request; 0 is a plain step.
        context: Tokens of each request before the step, about.
        sampled: Whether tokens are drawn; otherwise all requests are greedy.
        drafting: How many of the requests draft; None: all.
        target: The target's forward.
        drafter: Everything that the drafter does.
        rest: Rows, verifying and commit.
    """

    requests: int
    length: int
    context: int = 64
    sampled: bool = False
    drafting: int | None = None
    target: float
    drafter: float = 0.0
    rest: float = 0.0

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.target + self.drafter + self.rest

    @property
    def kind(self) -> tuple[int, int, int, bool, int | None]:
        """What kind of step it is."""
        return self.requests, self.length, self.context, self.sampled, self.drafting

    def times(self, factor: float) -> "StepCost":
        """The same kind of step, so many times as long."""
        return replace(self, **{part: factor * getattr(self, part) for part in PARTS})


@dataclass(frozen=True, kw_only=True)
class CostTable:
    r"""What steps cost here, as `outrider.plan.probe` measured it.

    A step of b requests at a context of L tokens, m of which draft $\gamma$ tokens, costs

    $$T = F(b, m, \gamma) + D(m, \gamma) + S_0(b) + \tfrac{m}{b} (S(b, \gamma) - S_0(b)) + (L - L_0) (b k_F + m k_D).$$

    F is the target's forward. It grows with m on a straight line from one request that drafts to all. If its rows are
    padded to the longest draft, the two cost the same, and so they do where one alone was not measured. D is the
    drafter, S the rest of a step, $S_0$ that of a plain one. $L_0$ is the shortest context that was measured, and the
    slopes k, which depend on b and $\gamma$, lead to the longest one. Between measured numbers of requests and lengths,
    costs follow straight lines. For more requests than were measured, F is read off by its number of tokens. Sampled
    steps have a D and S of their own. F does not depend on that, so it is the mean of a sampled row and a greedy one.

    Attributes:
        rows: What was measured. For some number of requests there is a greedy plain step and a longer one.
        catch_up: Seconds that the drafter takes for a token that it missed while its request did not draft.
        looking: Seconds that a drafter which looks tokens up takes to find a request's draft, or that there is none;
            None: as long as it takes in a step with drafts of one token.
        doubt: Relative standard error of a draft's cost over that of a plain step.
        unsteady: Standard deviation of the logarithm of how slow the machine was while the steps were timed.
        kept: Whether the table is kept on this machine, so that another process reads the same one.
        busy: Whether other processes took the cores meanwhile.
        measured: When it was measured, in seconds since 1970; None if that is not known.
        measurements: Of how many measurements it is the mean.

    Raises:
        ValueError: A row without a time, or no number of requests with a plain step and a longer one.

    Example:
        >>> table = CostTable.of_formula(lambda requests, length: requests + 0.5 * length, requests=(1, 4))
        >>> table.steps(2, sampled=False, context=64, longest=2).tolist()
        [[2.0, 2.0, 2.0], [2.0, 2.5, 3.0], [2.0, 2.5, 3.0]]
    """

    rows: tuple[StepCost, ...]
    catch_up: float = 0.0
    looking: float | None = None
    doubt: float = 0.0
    unsteady: float = 0.0
    kept: bool = False
    busy: bool = False
    measured: float | None = field(default=None, compare=False)
    measurements: int = 1
    _known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not all(math.isfinite(row.seconds) and row.seconds > 0 for row in self.rows) or not self._batches(False):
            raise ValueError("a table of costs needs a plain step and a longer one, each of more than 0 seconds")
        if not all(0 <= number < math.inf for number in (self.doubt, self.unsteady, self.looking or 0.0)):
            numbers = f"{self.doubt}, {self.unsteady} and {self.looking}"
            raise ValueError(f"doubt, unsteady and looking must be >= 0 and finite, got {numbers}")

    @classmethod
    def of_formula(
        cls, formula: Callable[[int, int], float], requests: Sequence[int] = (1, 2, 4, 8), longest: int = 8
    ) -> "CostTable":
        """A table of `formula(requests, length)` seconds, all of them the target's, as if it were kept."""
        kinds = [(b, n) for b in requests for n in range(longest + 1)]
        return cls(rows=tuple(StepCost(requests=b, length=n, target=formula(b, n)) for b, n in kinds), kept=True)

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> "CostTable":
        """The table that `values` described. Raises KeyError, TypeError or ValueError if they describe none."""
        measured, looking = values.get("measured"), values.get("looking")
        return cls(
            rows=tuple(StepCost(**row) for row in values["rows"]),
            catch_up=float(values["catch_up"]),
            looking=None if looking is None else float(looking),
            doubt=float(values["doubt"]),
            unsteady=float(values["unsteady"]),
            measured=None if measured is None else float(measured),
            measurements=int(values.get("measurements", 1)),
        )

    def values(self) -> dict[str, Any]:
        """The table as values of JSON. Whether it is kept or was disturbed is not among them."""
        names = ("catch_up", "looking", "doubt", "unsteady", "measured", "measurements")
        numbers = {name: getattr(self, name) for name in names}
        return {"rows": [asdict(row) for row in self.rows], **numbers}

    def combined(self, earlier: "CostTable") -> "CostTable":
        """The mean of two measurements, which has less doubt than each.

        The machine may have been slower as a whole in one of them. So the earlier one is first made as fast as this
        one, by the median of the kinds of steps that both have. A measurement of half the doubt counts four times.

        Example:
            >>> table = replace(CostTable.of_formula(lambda requests, length: 1 + length), doubt=0.1)
            >>> round(table.combined(table).doubt, 3)
            0.071
        """
        mine, others = ({row.kind: row for row in table.rows} for table in (self, earlier))
        both = [kind for kind in mine if kind in others]
        if not both:
            return self
        speed = statistics.median(mine[kind].seconds / others[kind].seconds for kind in both)
        weight, their_weight = (1 / max(table.doubt, 1e-3) ** 2 for table in (self, earlier))
        rows = {kind: row.times(speed) for kind, row in others.items()} | mine
        for kind in both:
            row, other, share = mine[kind], others[kind].times(speed), weight / (weight + their_weight)
            parts = {part: share * getattr(row, part) + (1 - share) * getattr(other, part) for part in PARTS}
            rows[kind] = replace(row, **parts)
        return replace(
            self,
            rows=tuple(rows.values()),
            doubt=1 / math.sqrt(weight + their_weight),
            measurements=self.measurements + earlier.measurements,
        )

    @property
    def margin(self) -> float:
        """How much faster than a plain step drafts must seem by these costs.

        Example:
            >>> table = CostTable.of_formula(lambda requests, length: requests + length)
            >>> round(table.margin, 3), round(replace(table, doubt=0.1).margin, 3)
            (0.066, 0.164)
        """
        return Z_SCORE * max(LEAST_DOUBT, self.doubt)

    @property
    def context(self) -> int:
        """The shortest context that was measured."""
        return min(row.context for row in self.rows)

    def steps(self, requests: int, *, sampled: bool, context: int, longest: int) -> Steps:
        """Seconds of steps of so many requests, by how many of them draft, and by the length of their drafts.

        Contexts are rounded to half a power of two, so that they rarely change a choice.
        """
        return self._worked_out(requests, sampled, context, longest)[0][:, : longest + 1]

    def missed(self, requests: int, *, sampled: bool, context: int) -> Float[np.ndarray, " asking"]:
        """Seconds of steps of so many requests in which the drafter finds no draft, by how many of them ask for one."""
        return self._worked_out(requests, sampled, context, 1)[1]

    @cached_property
    def without_drafter(self) -> "CostTable":
        """What steps cost in which another drafter drafts, which takes no time."""
        return replace(self, rows=tuple(replace(row, drafter=0.0) for row in self.rows), catch_up=0.0, looking=0.0)

    def trees(self, requests: int, width: float, *, sampled: bool, context: int, longest: int) -> Steps:
        """Seconds of steps as `steps` has them, if drafts are trees with `width` nodes at each depth.

        Example:
            >>> table = CostTable.of_formula(lambda requests, length: requests + 0.5 * length)
            >>> table.trees(1, 2.0, sampled=False, context=64, longest=2).tolist()
            [[1.0, 1.0, 1.0], [1.0, 2.0, 3.0]]
        """
        nodes = width * np.arange(longest + 1)
        verified = self.without_drafter.steps(
            requests, sampled=sampled, context=context, longest=math.ceil(float(nodes[-1]))
        )
        steps = np.stack([np.interp(nodes, np.arange(verified.shape[1]), row) for row in verified])
        steps += self._part("drafter", sampled, requests, 0)[0]
        for m in range(1, requests + 1):
            first, later = (
                self.readings(math.ceil(m * read), m, sampled=sampled, context=context, longest=longest)
                for read in (1.0, width)
            )
            steps[m, 1:] += np.cumsum(np.append(first[:1], later[1:]))
        return steps

    def readings(
        self, nodes: int, requests: int, *, sampled: bool, context: int, longest: int
    ) -> Float[np.ndarray, " longest"]:
        """Seconds in which the drafter reads so many nodes together, of some requests: at depth 0, which are the roots,
        at depth 1, ... It takes what one more token takes in chains of as many requests as there are nodes.
        """
        parts = self._part("drafter", sampled, nodes, longest)
        farther = max(0.0, context - self.context) * requests
        return np.maximum(np.diff(parts + farther * self._slopes("drafter", requests, longest)), 0.0)

    def tree(self, requests: int, widths: Sequence[int], *, sampled: bool, context: int) -> float:
        r"""Seconds of a step in which all requests draft a tree, estimated from steps of chains.

        The target and the rest of the step take what a chain of as many nodes takes. A level for which the drafter
        reads w nodes of each request takes what one more token takes in chains of w times as many requests.

        Args:
            requests: Number of requests.
            widths: Nodes of each request at depth 1, 2, ...

        Example:
            >>> table = CostTable.of_formula(lambda requests, length: requests + 0.5 * length)
            >>> table.tree(1, (2, 2), sampled=False, context=64), table.tree(1, (1, 1), sampled=False, context=64)
            (3.0, 2.0)
        """
        nodes = sum(widths)
        seconds = self._forwards(requests, nodes)[nodes] + self._part("rest", sampled, requests, nodes)[nodes]
        for depth, read in enumerate((1, *widths[:-1]), 1):
            parts = self._part("drafter", sampled, requests * read, depth)
            seconds += max(0.0, parts[depth] - parts[depth - 1])
        seconds += self._part("drafter", sampled, requests, 0)[0]
        of_target, of_drafter = (self._slopes(part, requests, nodes) for part in ("target", "drafter"))
        farther = max(0.0, context - self.context) * requests
        return float(seconds + farther * (of_target[nodes] + of_drafter[min(len(widths), nodes)]))

    def _worked_out(
        self, requests: int, sampled: bool, context: int, longest: int
    ) -> tuple[Steps, Float[np.ndarray, " asking"]]:
        """What `steps` and `missed` say, for all lengths up to `USUAL` at least."""
        near = round(2 * math.log2(max(context, 1)))
        key = (requests, sampled, near)
        if key not in self._known or self._known[key][0].shape[1] <= longest:
            longest, farther = max(longest, USUAL), max(0.0, 2 ** (near / 2) - self.context)
            drafting = np.arange(1, requests + 1)[:, None]
            all_, one = self._forwards(requests, longest), self._with_one(requests, longest)
            target = one + (drafting - 1) / max(1, requests - 1) * (all_ - one)
            rest = self._part("rest", sampled, requests, longest)
            looks = np.stack([self._part("drafter", sampled, m, longest) for m in range(1, requests + 1)])
            of_target, of_drafter = (self._slopes(part, requests, longest) for part in ("target", "drafter"))
            plain = (
                all_[0] + self._part("drafter", sampled, requests, 0)[0] + rest[0] + farther * requests * of_target[0]
            )
            steps = target + looks + rest[0] + drafting / requests * (rest - rest[0])
            steps += farther * (requests * of_target + drafting * of_drafter)
            steps[:, 0] = plain
            steps = np.maximum(np.vstack([np.full(longest + 1, plain), steps]), plain / 10)
            steps.setflags(write=False)
            asked = [0.0, *looks[:, 1]] if self.looking is None else self.looking * np.arange(requests + 1)
            self._known[key] = steps, plain + np.array(asked)
        known: tuple[Steps, Float[np.ndarray, " asking"]] = self._known[key]
        return known

    def _forwards(self, requests: int, longest: int) -> Float[np.ndarray, " lengths"]:
        """The target's forwards over drafts of 0 to `longest` tokens; of many requests by the number of tokens."""
        most = max(self._batches(False))
        if requests <= most:
            return self._part("target", False, requests, longest)
        rows = self._batches(False)[most]
        tokens = [most * (1 + row.length) for row in rows]
        return _line(requests * (1.0 + np.arange(longest + 1)), tokens, [self._of(row, "target") for row in rows])

    def _with_one(self, requests: int, longest: int) -> Float[np.ndarray, " lengths"]:
        """The target's forwards where one request drafts 0 to `longest` tokens, and the others none.

        What one draft adds to a plain forward is known as a share of what the drafts of all add.
        """
        all_, batches = self._forwards(requests, longest), self._batches(False)
        shares: Lines = {}
        for b, rows in self._batches(False, drafting=1).items() if requests > 1 else ():
            if b in batches:
                plain, places = self._of(batches[b][0], "target"), [row.length for row in rows]
                whole = self._part("target", False, b, max(places))[places] - plain
                more = np.array([self._of(row, "target") for row in rows]) - plain
                share = np.divide(more, whole, out=np.ones_like(more), where=whole > 0).clip(0, 1)
                shares[b] = np.interp(np.arange(longest + 1), places, share)
        return all_[0] + _between(requests, shares, beyond=False) * (all_ - all_[0]) if shares else all_

    def _part(self, part: str, sampled: bool, requests: int, longest: int) -> Float[np.ndarray, " lengths"]:
        """A part of steps with drafts of 0 to `longest` tokens: between measured ones, and on beyond the last two."""
        key = (part, sampled, longest)
        if key not in self._known:
            self._known[key] = {
                b: _line(np.arange(longest + 1.0), [row.length for row in rows], [self._of(row, part) for row in rows])
                for b, rows in (self._batches(sampled) or self._batches(False)).items()
            }
        return _between(requests, self._known[key])

    def _of(self, row: StepCost, part: str) -> float:
        """A part of a row; the target's from all rows of such steps, because each has errors of its own."""
        if part != "target":
            return float(getattr(row, part))
        if "targets" not in self._known:
            alike: dict[Any, list[float]] = {}
            for each in self.rows:
                alike.setdefault((each.requests, each.length, each.context, each.drafting), []).append(each.target)
            self._known["targets"] = {kind: statistics.mean(seconds) for kind, seconds in alike.items()}
        return float(self._known["targets"][row.requests, row.length, row.context, row.drafting])

    def _slopes(self, part: str, requests: int, longest: int) -> Float[np.ndarray, " lengths"]:
        """What a further token of each request's context adds to a part, per request."""
        lines: Lines = {}
        for b, rows in self._batches(False, far=True).items():
            near = {row.length: row for row in self._batches(False).get(b, ())}
            pairs = [(row, near[row.length]) for row in rows if row.length in near]
            longer = [
                (getattr(row, part) - getattr(other, part)) / (row.context - other.context) for row, other in pairs
            ]
            if pairs:
                places = [row.length for row, _ in pairs]
                lines[b] = _line(np.arange(longest + 1.0), places, [max(0.0, each) / b for each in longer])
        return _between(requests, lines, beyond=False) if lines else np.zeros(longest + 1)

    def _batches(self, sampled: bool, drafting: int | None = None, far: bool = False) -> dict[int, list[StepCost]]:
        """The rows of the shortest context, or of a longer one, by number of requests. Where all draft at the shortest,
        those numbers alone for which plain and longer steps were measured.
        """
        if "kinds" not in self._known:
            kinds: dict[Any, dict[int, list[StepCost]]] = {}
            for row in sorted(self.rows, key=lambda row: (row.requests, row.length)):
                kind = row.sampled, row.drafting, row.context > self.context
                kinds.setdefault(kind, {}).setdefault(row.requests, []).append(row)
            for is_sampled in (False, True):
                batches = kinds.get((is_sampled, None, False), {})
                for b in [b for b, rows in batches.items() if rows[0].length or len(rows) == 1]:
                    del batches[b]
            self._known["kinds"] = kinds
        found: dict[int, list[StepCost]] = self._known["kinds"].get((sampled, drafting, far), {})
        return found


def plain_seconds(tables: Sequence[CostTable], requests: int, *, sampled: bool, context: int) -> float:
    """Seconds of a plain step, where there are tables of several drafters: their median."""
    return statistics.median(
        float(table.steps(requests, sampled=sampled, context=context, longest=1)[0, 0]) for table in tables
    )


def _line(x: Float[np.ndarray, " n"], places: Sequence[float], values: Sequence[float]) -> Float[np.ndarray, " n"]:
    """Straight lines between values at ascending places, and on beyond the last two. One value is a constant."""
    line = np.interp(x, places, values)
    if len(places) > 1:
        slope = (values[-1] - values[-2]) / (places[-1] - places[-2])
        line = np.where(x > places[-1], np.maximum(values[-1] + slope * (x - places[-1]), 0.0), line)
    return line


def _between(requests: int, lines: Lines, *, beyond: bool = True) -> Float[np.ndarray, " n"]:
    """Values for a number of requests between those at ascending numbers, and on beyond the last two if wanted."""
    places = [*lines]
    if len(places) == 1:
        return lines[places[0]]
    i = min(max(bisect.bisect_left(places, requests), 1), len(places) - 1)
    share = max(0.0, (requests - places[i - 1]) / (places[i] - places[i - 1]))
    low, high = lines[places[i - 1]], lines[places[i]]
    between: Float[np.ndarray, " n"] = np.maximum(low + (share if beyond else min(share, 1.0)) * (high - low), 0.0)
    return between
