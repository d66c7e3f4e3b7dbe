"""The exact law of stochastic beam search trees on tiny vocabularies (Kool et al. 2019; the drafts of RSD-S)."""

from collections import defaultdict
from collections.abc import Callable
from itertools import product

import numpy as np

Prefix = tuple[int, ...]
Levels = tuple[tuple[Prefix, ...], ...]
"""Per depth, from 1, the kept prefixes in descending perturbed value."""


def beam_trees(q: Callable[[Prefix], np.ndarray], vocab: int, depth: int, width: int) -> dict[Levels, float]:
    r"""Every tree of a stochastic beam search and its probability.

    Perturb the log-probability of every leaf sequence by Gumbel noise. In descending perturbed value the leaves stand
    in Plackett-Luce order: the next one is drawn in proportion to $q$ among those not yet drawn. A prefix's perturbed
    value is the largest below it, so prefixes of one length are ordered by first appearance, and each level keeps the
    first `width` prefixes whose parents were kept.

    A leaf that would change nothing now never will, since levels only fill up; and a Plackett-Luce order restricted to
    a subset is again one with the same weights. So only leaves that change something are drawn, and what was drawn
    before is told by the levels themselves.

    Args:
        q: The draft's distribution after a prefix.
        depth: Length of a leaf sequence.
        width: Most prefixes kept per level.

    Example:
        >>> law = beam_trees(lambda prefix: np.array([0.75, 0.25]), vocab=2, depth=1, width=2)
        >>> {levels: round(float(mass), 12) for levels, mass in law.items()}
        {(((0,), (1,)),): 0.75, (((1,), (0,)),): 0.25}

    References:
        Kool et al. 2019. https://arxiv.org/abs/1903.06059
        Jeon et al. 2024, RSD, section 3.2. https://arxiv.org/abs/2402.14160
    """
    weights = {leaf: _weight(q, leaf) for leaf in product(range(vocab), repeat=depth)}
    weights = {leaf: weight for leaf, weight in weights.items() if weight > 0}
    finished: dict[Levels, float] = defaultdict(float)

    def follow(levels: Levels, probability: float) -> None:
        following = {leaf: after for leaf in weights if (after := show(levels, leaf, width)) != levels}
        total = sum(weights[leaf] for leaf in following)
        if not following:
            finished[levels] += probability
        for leaf, after in following.items():
            follow(after, probability * weights[leaf] / total)

    follow(((),) * depth, 1.0)
    return dict(finished)


def show(levels: Levels, leaf: Prefix, width: int) -> Levels:
    """The levels after the next leaf in descending perturbed value was seen."""
    shown = list(levels)
    for length in range(1, len(leaf) + 1):
        kept = shown[length - 1]
        if leaf[:length] not in kept:
            if len(kept) == width:
                break
            shown[length - 1] = (*kept, leaf[:length])
    return tuple(shown)


def children(levels: Levels) -> dict[Prefix, tuple[int, ...]]:
    """Per kept prefix its children in descending perturbed value, the order in which a verifier must see them.

    Example:
        >>> children((((1,), (0,)), ((0, 1), (0, 0))))
        {(): (1, 0), (0,): (1, 0)}
    """
    found: dict[Prefix, tuple[int, ...]] = {}
    for level in levels:
        for prefix in level:
            found[prefix[:-1]] = (*found.get(prefix[:-1], ()), prefix[-1])
    return found


def _weight(q: Callable[[Prefix], np.ndarray], leaf: Prefix) -> float:
    weight = 1.0
    for i, x in enumerate(leaf):
        weight *= float(q(leaf[:i])[x])
    return weight
