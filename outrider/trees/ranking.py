"""For trees of chosen children: the likeliest tokens of a level, and the best nodes of each request."""

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from outrider.trees.protocol import Level


class Likeliest:
    """The `count` likeliest tokens of every row of a level, with the log-probability of the path to each.

    Attributes:
        tokens: Token ids, likeliest first.
        logs: Log-probability of the path to each, by the drafter's own rows.
    """

    def __init__(self, level: Level, count: int) -> None:
        best = level.scores.topk(min(count, level.scores.shape[1]), -1)
        # One copy: a token's number is exact in float64.
        ids, logs = torch.stack([best.indices.double(), best.values.double()]).cpu().numpy()
        self.tokens: Int[np.ndarray, "n count"] = ids.astype(np.int64)
        self.logs: Float[np.ndarray, "n count"] = logs
        if level.depth:
            self.logs = self.logs + level.values[:, :1]


def best_of_each(owners: Int[np.ndarray, " n"], scores: Float[np.ndarray, " n"], count: int) -> Bool[np.ndarray, " n"]:
    """Which items are among the `count` highest of their owner; of equal items the earlier one.

    Example:
        >>> best_of_each(np.array([0, 0, 0, 1]), np.array([0.5, 2.0, 1.0, 0.1]), 2).tolist()
        [False, True, True, True]
    """
    order = np.lexsort([np.arange(len(owners)), -scores, owners])
    rank = np.arange(len(owners)) - np.searchsorted(owners[order], owners[order])
    mask = np.zeros(len(owners), dtype=bool)
    mask[order[rank < count]] = True
    return mask
