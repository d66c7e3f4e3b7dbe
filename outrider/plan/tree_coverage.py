"""How many steps a given text takes with drafted trees, where a rule judges each node by that node alone.

What a chain is expected to take for a text, `outrider.theory.coverage` says. The same holds for trees whose nodes draw
their children by themselves: a step that emits the text accepts the text's next token at a node with a chance that the
rows at that place tell, whatever else is in the tree. Nothing is drafted and no coin is thrown.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float

from outrider.verifiers.kseq import discount

Row = Float[np.ndarray, " vocab"]
Chances = Float[np.ndarray, "..."]
POINTS = 16
"""First draws that were refused over which the mean is taken, where there are more."""


@runtime_checkable
class DraftedTree(Protocol):
    """A way to draft trees, with a rule."""

    @property
    def depth(self) -> int:
        """Draft tokens on the longest path."""
        ...

    @property
    def num_nodes(self) -> int:
        """Draft tokens that are drawn."""
        ...

    @property
    def kind(self) -> object:
        """Ways of one kind have the same chances at a place."""
        ...

    def chances(self, p: Row, q: Row, token: int, start: float) -> Chances:
        """What the rows of a place tell of the text's token there; `start` in [0, 1) spreads what is sampled."""
        ...

    def survival(self, places: Sequence[Chances]) -> Float[np.ndarray, " bounds"]:
        """Chance that a step accepts at least 0, 1, ... tokens, given that what it emits is the text."""
        ...


@dataclass(frozen=True, kw_only=True)
class Branches:
    """Children drawn without replacement, `counts[d]` per node of depth d, judged by recursive rejection (RSD-C)."""

    counts: tuple[int, ...]

    @property
    def depth(self) -> int:
        """Levels."""
        return len(self.counts)

    @property
    def num_nodes(self) -> int:
        """Nodes of all levels."""
        return int(np.cumprod(self.counts).sum())

    @property
    def kind(self) -> object:
        """The largest count of children."""
        return "branches", max(self.counts)

    def chances(self, p: Row, q: Row, token: int, start: float) -> Float[np.ndarray, " counts"]:
        """Chance that one of 0, 1, 2, ... children is accepted and is the token, over that of the token."""
        each = [accepted_of_distinct(p, q, token, n, start) / p[token] for n in range(1, max(self.counts) + 1)]
        return np.array([0.0, *each])

    def survival(self, places: Sequence[Chances]) -> Float[np.ndarray, " bounds"]:
        """The product of the levels' chances."""
        levels = [chances[n] for chances, n in zip(places, self.counts, strict=False)]
        return np.concatenate([[1.0], np.cumprod(levels)])


@dataclass(frozen=True, kw_only=True)
class SharedPaths:
    """Independent paths that share nodes where they begin alike, judged by recursive rejection or by K-SEQ."""

    count: int
    depth: int
    rule: Literal["recursive", "kseq"]

    @property
    def num_nodes(self) -> int:
        """Draws; nodes that are shared count for each path."""
        return self.count * self.depth

    @property
    def kind(self) -> object:
        """The rule and the number of paths."""
        return self.rule, self.count

    def chances(self, p: Row, q: Row, token: int, start: float) -> Float[np.ndarray, "paths paths"]:
        r"""With m paths at a node, the chance that the token is accepted and m' paths run through it, over that of it.

        The draw that is accepted is the j-th; each later one is the token with q(token), and under K-SEQ an earlier
        one may have been the token too, and refused.
        """
        masses = np.zeros((self.count + 1, self.count + 1))
        for m in range(1, self.count + 1):
            at_draw, before = _accepted_draws(p, q, token, m, self.rule)
            for j, mass in enumerate(at_draw):
                later = _binomial(m - j - 1, min(1.0, float(q[token])))
                earlier = _binomial(j, before)
                masses[m, 1 : m + 1] += mass * np.convolve(later, earlier)
        return masses / p[token]

    def survival(self, places: Sequence[Chances]) -> Float[np.ndarray, " bounds"]:
        """The mass that is left after each level."""
        mass = np.zeros(self.count + 1)
        mass[self.count] = 1.0
        survivals = [1.0]
        for chances in places[: self.depth]:
            mass = mass @ chances
            survivals.append(float(mass.sum()))
        return np.array(survivals)


@dataclass(frozen=True, kw_only=True)
class TopPlusOne:
    """Per node the `width - 1` likeliest tokens and one drawn from the others, judged by the rule of that name."""

    width: int
    depth: int

    @property
    def num_nodes(self) -> int:
        """Nodes of all levels."""
        return sum(self.width ** (d + 1) for d in range(self.depth))

    @property
    def kind(self) -> object:
        """The width."""
        return "top_plus_one", self.width

    def chances(self, p: Row, q: Row, token: int, start: float) -> Float[np.ndarray, " one"]:
        """Chance that a child is accepted and is the token, over that of the token."""
        top = np.argsort(-q, kind="stable")[: self.width - 1]
        if token in top:
            return np.array([float(q[token] > 0)])
        others = q.copy()
        others[top] = 0
        mass = others.sum()
        return np.array([min(1.0, float(others[token] / mass / p[token]))]) if mass > 0 else np.zeros(1)

    def survival(self, places: Sequence[Chances]) -> Float[np.ndarray, " bounds"]:
        """The product of the levels' chances."""
        return np.cumprod([1.0, *(float(chances[0]) for chances in places[: self.depth])])


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """The drafter's likeliest tokens in a given topology, judged by matching: `children` as in `FixedTree`."""

    children: tuple[int, ...]

    @property
    def widths(self) -> tuple[int, ...]:
        """Nodes at depth 1, 2, ..."""
        widths, here, first = list[int](), 1, 0
        while here:
            counts = self.children[first : first + here]
            first, here = first + here, sum(counts)
            widths.append(here)
        return tuple(widths[:-1])

    @property
    def depth(self) -> int:
        """Levels."""
        return len(self.widths)

    @property
    def num_nodes(self) -> int:
        """Nodes of all levels."""
        return sum(self.children)

    @property
    def kind(self) -> object:
        """All topologies read the same ranks."""
        return "ranks"

    def chances(self, p: Row, q: Row, token: int, start: float) -> Float[np.ndarray, " one"]:
        """How many tokens are likelier for the drafter; infinite for a token that it rules out."""
        return np.array([float((q > q[token]).sum()) if q[token] > 0 else np.inf])

    def survival(self, places: Sequence[Chances]) -> Float[np.ndarray, " bounds"]:
        """1 as long as the text runs along the tree, then 0."""
        survivals, node = np.zeros(min(self.depth, len(places)) + 1), 0
        survivals[0] = 1.0
        for level in range(1, len(survivals)):
            rank = float(places[level - 1][0])
            if node >= len(self.children) or rank >= self.children[node]:
                break
            node = 1 + sum(self.children[:node]) + int(rank)
            survivals[level] = 1.0
        return survivals


def _binomial(count: int, chance: float) -> Float[np.ndarray, " outcomes"]:
    """The chances of 0, 1, ..., `count` successes."""
    return np.array([math.comb(count, k) * chance**k * (1 - chance) ** (count - k) for k in range(count + 1)])


def accepted_of_distinct(p: Row, q: Row, token: int, n: int, start: float) -> float:
    r"""Chance that recursive rejection of n distinct draws accepts the token.

    The first draw is accepted as the token with $\min(p, q)$ and is x and refused with $(q - p)_+(x)$; after that,
    n - 1 draws from q without x face what is left of p. Exact for two draws. For more, the mean over x is taken at 16
    points that lie evenly over its law, from a start that is uniform, where there are more than 16 of them.

    Example:
        >>> p, q = np.array([0.3, 0.4, 0.3]), np.array([0.6, 0.3, 0.1])
        >>> round(sum(accepted_of_distinct(p, q, token, 2, 0.0) for token in range(3)), 12)
        0.875
    """
    if q[token] <= 0:
        return 0.0
    first = float(min(p[token], q[token]))
    over = np.maximum(q - p, 0)
    if n == 1 or p[token] <= q[token] or over.sum() <= 0:
        return first
    left = np.maximum(p - q, 0)
    left /= left.sum()
    if n == 2:
        others = np.where(over > 0, q.sum() - q, 1.0)
        with np.errstate(divide="ignore"):
            return first + float(over @ np.minimum(left[token], q[token] / np.maximum(others, 0)))
    again = 0.0
    for x, weight in _refused(over, start):
        rest = q.copy()
        rest[x] = 0
        again += weight * accepted_of_distinct(left, rest / rest.sum(), token, n - 1, start)
    return first + again


def _refused(over: Row, start: float) -> list[tuple[int, float]]:
    """Draws that are refused, with their chances; a sample of 16 where there are more."""
    there = np.flatnonzero(over)
    if len(there) <= POINTS:
        return list(zip(there.tolist(), over[there].tolist(), strict=True))
    points = (np.arange(POINTS) + start) / POINTS * over.sum()
    drawn = np.searchsorted(over.cumsum(), points, side="right").clip(max=len(over) - 1)
    tokens, counts = np.unique(drawn, return_counts=True)
    return list(zip(tokens.tolist(), (counts / POINTS * over.sum()).tolist(), strict=True))


def _accepted_draws(p: Row, q: Row, token: int, m: int, rule: str) -> tuple[list[float], float]:
    """Chance that the first, second, ... of m draws is accepted and is the token; chance that a refused one is it."""
    if rule == "kseq":
        target, draft = (torch.from_numpy(row)[None] for row in (p, q))
        rho, beta = (float(each) for each in discount(target, draft, torch.tensor([[m]], dtype=torch.float64)))
        accepted = min(q[token], p[token] / rho)
        refused = max(0.0, 1 - beta)
        before = (q[token] - accepted) / refused if refused > 0 else 0.0
        return [float(accepted * refused**j) for j in range(m)], float(min(1.0, max(0.0, before)))
    chances, left, reached = list[float](), p, 1.0
    for _ in range(m):
        chances.append(float(reached * min(left[token], q[token])))
        residual = np.maximum(left - q, 0)
        mass = residual.sum()
        if mass <= 0:
            return [*chances, *[0.0] * (m - len(chances))], 0.0
        left, reached = residual / mass, reached * mass
    # A token that was refused is never accepted later: nothing of the target is left at it.
    return chances, 0.0
