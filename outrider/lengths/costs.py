"""What steps cost on this machine: measured rows, and the cost of any step between them. A plain value."""

import bisect
import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float

Steps = tuple[tuple[float, ...], ...]
"""Seconds of a step: `steps[m][n]` where m requests draft n tokens each; `steps[0]` is plain throughout."""
SPAN = 8
"""Lengths of drafts whose costs are worked out at once."""


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
        return replace(self, target=factor * self.target, drafter=factor * self.drafter, rest=factor * self.rest)

    def plus(self, other: "StepCost", share: float) -> "StepCost":
        """The mean of two measurements of one kind of step, in which this one has a share."""
        mine, theirs = self.times(share), other.times(1 - share)
        return replace(
            self,
            target=mine.target + theirs.target,
            drafter=mine.drafter + theirs.drafter,
            rest=mine.rest + theirs.rest,
        )


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
        doubt: Relative standard error of a draft's cost over that of a plain step.
        unsteady: Standard deviation of the logarithm of how slow the machine was while the steps were timed.
        kept: Whether the table is kept on this machine, so that another process reads the same one.
        busy: Whether other processes took the cores meanwhile.
        measured: When it was measured, in seconds since 1970; None if that is not known.

    Raises:
        ValueError: A row without a time, or no number of requests with a plain step and a longer one.

    Example:
        >>> table = CostTable.of_formula(lambda requests, length: requests + 0.5 * length, requests=(1, 4))
        >>> table.steps(2, sampled=False, context=64, longest=2)
        ((2.0, 2.0, 2.0), (2.0, 2.5, 3.0), (2.0, 2.5, 3.0))
    """

    rows: tuple[StepCost, ...]
    catch_up: float = 0.0
    doubt: float = 0.0
    unsteady: float = 0.0
    kept: bool = False
    busy: bool = False
    measured: float | None = field(default=None, compare=False)
    _steps: dict[tuple[int, bool, int, int], Steps] = field(default_factory=dict, init=False, repr=False, compare=False)
    _asking: dict[tuple[int, bool], list[float]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _known: dict[tuple[str, bool, int], tuple[list[int], Float[np.ndarray, "batches lengths"]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not all(math.isfinite(row.seconds) and row.seconds > 0 for row in self.rows) or not self._batches(False):
            raise ValueError("a table of costs needs a plain step and a longer one, each of more than 0 seconds")
        if not all(0 <= number < math.inf for number in (self.doubt, self.unsteady)):
            raise ValueError(f"doubt and unsteady must be >= 0 and finite, got {self.doubt} and {self.unsteady}")

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
        rows = [
            StepCost(
                requests=int(row["requests"]),
                length=int(row["length"]),
                context=int(row["context"]),
                sampled=bool(row["sampled"]),
                drafting=None if row.get("drafting") is None else int(row["drafting"]),
                target=float(row["target"]),
                drafter=float(row["drafter"]),
                rest=float(row["rest"]),
            )
            for row in values["rows"]
        ]
        measured = values.get("measured")
        return cls(
            rows=tuple(rows),
            catch_up=float(values["catch_up"]),
            doubt=float(values["doubt"]),
            unsteady=float(values["unsteady"]),
            measured=None if measured is None else float(measured),
        )

    def values(self) -> dict[str, Any]:
        """The table as values of JSON. Whether it is kept or was disturbed is not among them."""
        numbers = {name: getattr(self, name) for name in ("catch_up", "doubt", "unsteady")}
        return {"rows": [asdict(row) for row in self.rows], **numbers, "measured": self.measured}

    def combined(self, earlier: "CostTable") -> "CostTable":
        """The mean of two measurements, which has less doubt than each.

        The machine may have been slower as a whole in one of them. So the earlier one is first made as fast as this
        one, by the median of the kinds of steps that both have. A measurement of half the doubt counts four times.

        Example:
            >>> table = replace(CostTable.of_formula(lambda requests, length: 1 + length), doubt=0.1)
            >>> round(table.combined(table).doubt, 3)
            0.071
        """
        measured, others = ({row.kind: row for row in table.rows} for table in (self, earlier))
        if measured.keys().isdisjoint(others):
            return self
        speed = statistics.median(
            row.seconds / others[kind].seconds for kind, row in measured.items() if kind in others
        )
        mine, theirs = (1 / max(table.doubt, 1e-3) ** 2 for table in (self, earlier))
        share = mine / (mine + theirs)
        rows = {kind: row.times(speed) for kind, row in others.items()}
        for kind, row in measured.items():
            rows[kind] = row.plus(rows[kind], share) if kind in rows else row
        return replace(self, rows=tuple(rows.values()), doubt=1 / math.sqrt(mine + theirs))

    @property
    def context(self) -> int:
        """The shortest context that was measured."""
        return min(row.context for row in self.rows)

    def steps(self, requests: int, *, sampled: bool, context: int, longest: int) -> Steps:
        """Seconds of steps of so many requests, by how many of them draft, and by the length of their drafts.

        Contexts are rounded to half a power of two, so that they rarely change a choice.
        """
        near = round(2 * math.log2(max(context, 1)))
        key = (requests, sampled, near, longest)
        if (seconds := self._steps.get(key)) is None:
            # Lengths up to the next multiple of eight are worked out at once: it takes as long for one as for all.
            most = SPAN * math.ceil(max(longest, 1) / SPAN)
            whole = self._steps.get((requests, sampled, near, most))
            if whole is None:
                whole = self._worked_out(requests, sampled, 2 ** (near / 2), most)
                self._steps[requests, sampled, near, most] = whole
            seconds = self._steps[key] = tuple(line[: longest + 1] for line in whole)
        return seconds

    def missed(self, requests: int, *, sampled: bool, context: int) -> list[float]:
        """Seconds of steps of so many requests in which the drafter finds no draft, by how many of them ask for one."""
        has_sampled = sampled and bool(self._batches(True))
        if (asking := self._asking.get((requests, has_sampled))) is None:
            asking = [0.0, *(float(self._part("drafter", has_sampled, m, 1)[1]) for m in range(1, requests + 1))]
            self._asking[requests, has_sampled] = asking
        plain = self.steps(requests, sampled=sampled, context=context, longest=1)[0][0]
        return [plain + more for more in asking]

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
        has_sampled, nodes = sampled and bool(self._batches(True)), sum(widths)
        seconds = self._forwards(requests, nodes)[nodes] + self._part("rest", has_sampled, requests, nodes)[nodes]
        for depth, read in enumerate((1, *widths[:-1]), 1):
            parts = self._part("drafter", has_sampled, requests * read, depth)
            seconds += max(0.0, parts[depth] - parts[depth - 1])
        seconds += self._part("drafter", has_sampled, requests, 0)[0]
        of_target, of_drafter, first = self._slopes(requests, nodes)
        farther = max(0.0, context - first) * requests
        return float(seconds + farther * (of_target[nodes] + of_drafter[min(len(widths), nodes)]))

    def _worked_out(self, requests: int, sampled: bool, context: float, longest: int) -> Steps:
        has_sampled = sampled and bool(self._batches(True))
        drafting = range(1, requests + 1)
        share = (np.array(drafting)[:, None] - 1) / max(1, requests - 1)
        all_, one = self._forwards(requests, longest), self._with_one(requests, longest)
        target = one + share * (all_ - one)
        drafter = np.stack([self._part("drafter", has_sampled, m, longest) for m in drafting])
        rest = self._part("rest", has_sampled, requests, longest)
        of_target, of_drafter, first = self._slopes(requests, longest)
        share, farther = np.array(drafting)[:, None], max(0.0, context - first)
        seconds = target + drafter + rest[0] + share / requests * (rest - rest[0])
        seconds = seconds + farther * (requests * of_target + share * of_drafter)
        # A plain step, whoever would draft.
        plain = (
            all_[0] + self._part("drafter", has_sampled, requests, 0)[0] + rest[0] + farther * requests * of_target[0]
        )
        seconds[:, 0] = plain
        lines = np.concatenate([np.full((1, longest + 1), plain), seconds])
        return tuple(tuple(line) for line in np.maximum(lines, plain / 10).tolist())

    def _forwards(self, requests: int, longest: int) -> Float[np.ndarray, " lengths"]:
        """The target's forwards over drafts of 0 to `longest` tokens."""
        most = max(self._batches(False))
        if requests <= most:
            return self._part("target", False, requests, longest)
        rows = self._batches(False)[most]
        tokens = [most * (1 + row.length) for row in rows]
        return _line(requests * (1.0 + np.arange(longest + 1)), tokens, [self._of(row, "target") for row in rows])

    def _with_one(self, requests: int, longest: int) -> Float[np.ndarray, " lengths"]:
        """The target's forwards where one request drafts 0 to `longest` tokens, and the others none."""
        all_, batches = self._forwards(requests, longest), self._batches(False)
        alone = {b: rows for b, rows in self._batches(False, drafting=1).items() if b in batches}
        if not alone or requests == 1:
            return all_
        # What one draft adds to a plain forward, as a share of what the drafts of all add.
        lengths, shares = np.arange(longest + 1.0), []
        for b, rows in alone.items():
            plain, places = self._of(batches[b][0], "target"), [row.length for row in rows]
            whole = self._part("target", False, b, max(places))[places] - plain
            more = np.array([self._of(row, "target") for row in rows]) - plain
            kept = np.divide(more, whole, out=np.ones_like(more), where=whole > 0).clip(0, 1)
            shares.append(np.interp(lengths, places, kept))
        share = np.array([np.interp(float(requests), list(alone), each) for each in np.stack(shares, axis=1)])
        return all_[0] + share * (all_ - all_[0])

    def _part(self, part: str, sampled: bool, requests: int, longest: int) -> Float[np.ndarray, " lengths"]:
        """A part of steps with drafts of 0 to `longest` tokens."""
        key = (part, sampled, longest)
        if (known := self._known.get(key)) is None:
            lengths, batches = np.arange(longest + 1.0), self._batches(sampled)
            each = [
                _line(lengths, [row.length for row in b], [self._of(row, part) for row in b]) for b in batches.values()
            ]
            known = self._known[key] = [*batches], np.stack(each)
        return _between(requests, *known)

    def _of(self, row: StepCost, part: str) -> float:
        """A part of a row; the target's from all rows of such steps, because each has errors of its own."""
        return (
            self._targets[row.requests, row.length, row.context, row.drafting]
            if part == "target"
            else float(getattr(row, part))
        )

    @functools.cached_property
    def _targets(self) -> dict[tuple[int, int, int, int | None], float]:
        """Seconds of the target's forward by requests, length, context, and how many draft."""
        by_kind: dict[tuple[int, int, int, int | None], list[float]] = {}
        for row in self.rows:
            by_kind.setdefault((row.requests, row.length, row.context, row.drafting), []).append(row.target)
        return {kind: statistics.mean(seconds) for kind, seconds in by_kind.items()}

    def _slopes(
        self, requests: int, longest: int
    ) -> tuple[Float[np.ndarray, " lengths"], Float[np.ndarray, " lengths"], int]:
        """What a further token of each request's context adds per request, to target and drafter, and from where on."""
        first = min(row.context for row in self.rows)
        near = {
            (row.requests, row.length): row
            for row in self.rows
            if row.context == first and not row.sampled and row.drafting is None
        }
        far: dict[int, list[StepCost]] = {}
        for row in sorted(self.rows, key=lambda row: (row.requests, row.length)):
            if row.context > first and not row.sampled and (row.requests, row.length) in near:
                far.setdefault(row.requests, []).append(row)
        lengths, nothing = np.arange(longest + 1.0), np.zeros(longest + 1)
        if not far:
            return nothing, nothing, first

        def slope(part: str) -> Float[np.ndarray, " lengths"]:
            by_batch = []
            for b, rows in far.items():
                longer = [getattr(row, part) - getattr(near[b, row.length], part) for row in rows]
                per_token = [max(0.0, s) / (row.context - first) / b for s, row in zip(longer, rows, strict=True)]
                by_batch.append(_line(lengths, [row.length for row in rows], per_token))
            each = np.stack(by_batch, axis=1)
            return np.array([np.interp(float(requests), list(far), values) for values in each])

        return slope("target"), slope("drafter"), first

    def _batches(self, sampled: bool, drafting: int | None = None) -> dict[int, list[StepCost]]:
        """The rows of the shortest context by number of requests. Where all draft, those numbers alone for which plain
        and longer steps were measured.
        """
        return self._kinds.get((sampled, drafting), {})

    @functools.cached_property
    def _kinds(self) -> dict[tuple[bool, int | None], dict[int, list[StepCost]]]:
        """What `_batches` returns, by what it is asked for."""
        first = min((row.context for row in self.rows), default=0)
        kinds: dict[tuple[bool, int | None], dict[int, list[StepCost]]] = {}
        for row in sorted(self.rows, key=lambda row: (row.requests, row.length)):
            if row.context == first:
                kinds.setdefault((row.sampled, row.drafting), {}).setdefault(row.requests, []).append(row)
        for (_, drafting), batches in kinds.items():
            if drafting is None:
                for b, rows in [*batches.items()]:
                    if rows[0].length or len(rows) == 1:
                        del batches[b]
        return kinds


def plain_seconds(tables: Sequence[CostTable], requests: int, *, sampled: bool, context: int) -> float:
    """Seconds of a plain step, where there are tables of several drafters: their median."""
    return statistics.median(
        table.steps(requests, sampled=sampled, context=context, longest=1)[0][0] for table in tables
    )


def _line(
    x: Float[np.ndarray, " n"], places: Sequence[float], values: Sequence[float] | Float[np.ndarray, " m"]
) -> Float[np.ndarray, " n"]:
    """Straight lines between values at ascending places, and on beyond the last two. One value is a constant."""
    line = np.interp(x, places, values)
    if len(places) > 1:
        slope = (values[-1] - values[-2]) / (places[-1] - places[-2])
        line = np.where(x > places[-1], np.maximum(values[-1] + slope * (x - places[-1]), 0.0), line)
    return line


def _between(x: float, places: Sequence[int], values: Float[np.ndarray, "places n"]) -> Float[np.ndarray, " n"]:
    """Values at x between those at ascending places, as `_line` has them for each column."""
    if len(places) == 1 or x <= places[0]:
        return values[0]
    i = min(bisect.bisect_left(places, x), len(places) - 1)
    share = (x - places[i - 1]) / (places[i] - places[i - 1])
    between: Float[np.ndarray, " n"] = np.maximum(values[i - 1] + share * (values[i] - values[i - 1]), 0.0)
    return between
