"""The best paths through a lattice of tokens: a beam search that merges equal ends, and their conditional rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from outrider.heads.parts.backoff import BackoffModel


@dataclass(frozen=True, kw_only=True, eq=False)
class BestPaths:
    """Different paths of one length, the best first.

    Attributes:
        tokens: The tokens of each.
        scores: The score of each; never rising.
    """

    tokens: Int[np.ndarray, "paths depth"]
    scores: Float[np.ndarray, " paths"]

    def behind(self, prefix: Sequence[int]) -> tuple[Int[np.ndarray, " n"], Float[np.ndarray, " n"]]:
        r"""The tokens that follow a prefix in any of the paths, and for each the logarithm of the sum of $e^s$ over
        the scores $s$ of these paths. None if no path is longer than the prefix and begins with it.

        Example:
            >>> paths = BestPaths(tokens=np.array([[1, 2], [1, 3]]), scores=np.array([0.5, 0.0]))
            >>> paths.behind([1])[0].tolist(), paths.behind([2])[0].tolist()
            ([2, 3], [])
        """
        depth = len(prefix)
        if depth >= self.tokens.shape[1]:
            return np.zeros(0, dtype=np.int64), np.zeros(0)
        here = (self.tokens[:, :depth] == np.array(prefix, dtype=np.int64)).all(1)
        tokens, which = np.unique(self.tokens[here, depth], return_inverse=True)
        sums = np.full(len(tokens), -np.inf)
        np.logaddexp.at(sums, which, self.scores[here])
        return tokens, sums


def best_paths(
    tokens: Int[np.ndarray, "depth choices"],
    scores: Float[np.ndarray, "depth choices"],
    *,
    count: int,
    beam: int,
    context: Sequence[int] = (),
    model: BackoffModel | None = None,
    mu: float = 0.0,
) -> BestPaths:
    r"""The paths with the largest $\sum_i a_i(y_i) + \mu \sum_i \log G(y_i \mid \text{context}, y_1 \ldots y_{i-1})$.

    Two prefixes with the same last tokens have the same continuations, so that of those only the best `count` go on.
    The result is exact if the beam holds all of these.

    Args:
        tokens: The tokens that may stand at each depth.
        scores: $a_i$ of each.
        count: How many paths.
        beam: How many prefixes go on at each depth, at least `count`.
        context: The tokens before the lattice.
        model: G; None: 1.
        mu: $\mu$.

    References:
        Kim et al. 2024. https://arxiv.org/abs/2404.09221
    """
    width = 0 if model is None or not mu else model.order - 1
    tail = np.array(context[max(0, len(context) - width) :] if width else (), dtype=np.int64)
    contexts = np.full((1, width), -1)
    contexts[0, width - len(tail) :] = tail
    paths, sums = np.zeros((1, 0), dtype=np.int64), np.zeros(1)
    for row, row_scores in zip(tokens, scores, strict=True):
        grown = sums[:, None] + row_scores
        if model is not None and mu:
            grown = grown + mu * model.score(contexts, np.broadcast_to(row, grown.shape))
        order = np.argsort(-grown.ravel(), kind="stable")
        above, choice = np.divmod(order, len(row))
        after = np.concatenate([contexts[above], row[choice, None]], 1)[:, 1:]
        kept = np.flatnonzero(_rank(after) < count)[: max(beam, count)]
        above, choice = above[kept], choice[kept]
        paths = np.concatenate([paths[above], row[choice, None]], 1)
        contexts, sums = after[kept], grown[above, choice]
    return BestPaths(tokens=paths[:count], scores=sums[:count])


def _rank(rows: Int[np.ndarray, "n width"]) -> Int[np.ndarray, " n"]:
    """How many equal rows stand before each row.

    Example:
        >>> _rank(np.array([[1, 2], [3, 4], [1, 2]])).tolist()
        [0, 0, 1]
    """
    _, same = np.unique(rows, axis=0, return_inverse=True) if rows.shape[1] else (None, np.zeros(len(rows), np.int64))
    same = same.reshape(len(rows))
    order = np.argsort(same, kind="stable")
    first = np.searchsorted(same[order], same[order])
    rank = np.empty(len(rows), dtype=np.int64)
    rank[order] = np.arange(len(rows)) - first
    return rank
