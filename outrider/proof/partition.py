"""The classes of outputs that a test of samples distinguishes, chosen by the target's law before any draw."""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

LEAST_EXPECTED = 5.0
"""Fewest draws that are expected of a class of outputs; below, chi-square is no good approximation."""
MOST_CLASSES = 16
"""Most classes of outputs of one prompt. More look closer, but each then has fewer draws to speak for it."""

WAYS = 12
"""Into how many classes one is split, about."""

Begun = tuple[int, ...]
"""The first tokens of an output."""
Rows = Callable[[Sequence[Begun]], Float[np.ndarray, "begun vocab"]]
"""The target's distribution after each of some beginnings."""
OWN, RARE, NEVER = 0, -1, -2
"""The groups of tokens that are told apart, that are too rare even together, and that cannot come."""


@dataclass(frozen=True, kw_only=True)
class Class:
    """Outputs that begin in one way and go on with a token of one group."""

    begun: Begun = ()
    group: int = OWN


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Classes of outputs, by how they begin.

    Attributes:
        groups: For each beginning that is looked beyond, the group of every token that may follow.
        expected_counts: How many draws are expected of each class.
        rest: The class that outputs with rare tokens are counted in.
    """

    groups: Mapping[Begun, Int[np.ndarray, " vocab"]]
    expected_counts: Mapping[Class, float]
    rest: Class

    def of(self, output: Sequence[int]) -> Class | None:
        """The class of an output; None where the target would never emit it."""
        for length, token in enumerate(output):
            begun = tuple(output[:length])
            if begun not in self.groups:
                return Class(begun=begun)
            group = int(self.groups[begun][token])
            if group == NEVER:
                return None
            if group == RARE:
                return self.rest
            if group != OWN:
                return Class(begun=begun, group=group)
        return Class(begun=tuple(output))


def partition(rows: Rows, num_draws: int, length: int, at_once: int = 8) -> Partition:
    """Classes that are expected often enough to be counted; the likeliest outputs are looked at most closely.

    All outputs are one class at first. The likeliest class is split by its next token, again and again. Tokens that
    are too rare by themselves are put together with others of about their probability, so that a flat law is told apart
    as well as a peaked one.

    Args:
        num_draws: How many outputs will be drawn.
        length: Most tokens of an output that are looked at.
        at_once: About how many beginnings the target is asked at once.

    Example:
        >>> coin = lambda begun: np.full((len(begun), 2), 0.5)
        >>> partition(coin, num_draws=40, length=2).expected_counts[Class(begun=(0, 1))]
        10.0
    """
    groups: dict[Begun, Int[np.ndarray, " vocab"]] = {}
    expected_counts: dict[Class, float] = {Class(): float(num_draws)}
    waiting: list[tuple[float, Begun]] = [(-float(num_draws), ())]
    rare = 0.0
    while waiting and len(expected_counts) < MOST_CLASSES:
        some = [heapq.heappop(waiting) for _ in range(min(at_once, len(waiting)))]
        for (count, begun), row in zip(some, rows([begun for _, begun in some]), strict=True):
            del expected_counts[Class(begun=begun)]
            continuing = -count * row
            groups[begun] = _groups(continuing)
            rare += float(continuing[groups[begun] == RARE].sum())
            for token in np.flatnonzero(groups[begun] == OWN).tolist():
                longer = (*begun, token)
                expected_counts[Class(begun=longer)] = float(continuing[token])
                if len(longer) < length and continuing[token] >= 2 * LEAST_EXPECTED:
                    heapq.heappush(waiting, (-float(continuing[token]), longer))
            for group in range(1, int(groups[begun].max()) + 1):
                expected_counts[Class(begun=begun, group=group)] = float(continuing[groups[begun] == group].sum())
    rest = Class(group=RARE)
    if rare < LEAST_EXPECTED and expected_counts:
        rest = min(expected_counts, key=lambda each: expected_counts[each])
    expected_counts[rest] = expected_counts.get(rest, 0.0) + rare
    return Partition(groups=groups, expected_counts=expected_counts, rest=rest)


def _groups(expected_counts: Float[np.ndarray, " vocab"]) -> Int[np.ndarray, " vocab"]:
    """The group of every token, given how often each is expected."""
    least = max(LEAST_EXPECTED, float(expected_counts.sum()) / WAYS)
    groups = np.where(expected_counts >= least, OWN, np.where(expected_counts > 0, RARE, NEVER)).astype(np.int32)
    others = np.flatnonzero(groups == RARE)
    others = others[np.argsort(-expected_counts[others], kind="stable")]
    running = np.concatenate([[0.0], expected_counts[others].cumsum()])
    first = 0
    while running[-1] - running[first] >= least:
        end = int(np.searchsorted(running, running[first] + least))
        if running[-1] - running[end] < least:
            # What would be left over belongs to the last group.
            end = len(others)
        groups[others[first:end]] = max(groups.max(), OWN) + 1
        first = end
    return groups
