"""For trees of chosen children: the likeliest tokens of a level, and the best nodes of each request."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from outrider.trees.protocol import Level


@dataclass(frozen=True, kw_only=True)
class Likeliest:
    """The likeliest tokens of every row of a level, likeliest first.

    Attributes:
        tokens: Token ids; -1 where a drafter knows fewer.
        logs: Their log-probabilities, by the drafter's own rows or choices; -inf for what cannot be.
    """

    tokens: Int[np.ndarray, "n count"]
    logs: Float[np.ndarray, "n count"]

    @classmethod
    def of(cls, level: Level, count: int) -> "Likeliest":
        """The `count` likeliest tokens, or as many as there are."""
        if level.choices is not None:
            with np.errstate(divide="ignore"):
                return cls(tokens=level.choices.tokens[:, :count], logs=np.log(level.choices.chances[:, :count]))
        best = level.scores.topk(min(count, level.scores.shape[1]), -1)
        # One copy: a token's number is exact in float64.
        ids, logs = torch.stack([best.indices.double(), best.values.double()]).cpu().numpy()
        return cls(tokens=ids.astype(np.int64), logs=logs)


@dataclass(frozen=True, kw_only=True)
class Extensions:
    """The paths to the nodes of a level, each one token longer.

    Attributes:
        parents: Place in the level of the node that each extends.
        tokens: The token.
        logs: Log-probability of the path.
    """

    parents: Int[np.ndarray, " m"]
    tokens: Int[np.ndarray, " m"]
    logs: Float[np.ndarray, " m"]

    @classmethod
    def of(cls, level: Level, count: int) -> "Extensions":
        """The paths through the `count` likeliest tokens of each node, without those that cannot be."""
        best = Likeliest.of(level, count)
        logs = best.logs + level.values[:, :1] if level.depth else best.logs
        parents, ranks = np.nonzero(logs > -np.inf)
        return cls(parents=parents, tokens=best.tokens[parents, ranks], logs=logs[parents, ranks])


def best_of_each(owners: Int[np.ndarray, " n"], scores: Float[np.ndarray, " n"], count: int) -> Bool[np.ndarray, " n"]:
    """Which items are among the `count` highest of their owner; of equal items the earlier one.

    Example:
        >>> best_of_each(np.array([0, 0, 0, 1]), np.array([0.5, 2.0, 1.0, 0.1]), 2).tolist()
        [False, True, True, True]
    """
    return rank_of_each(owners, scores) < count


def rank_of_each(owners: Int[np.ndarray, " n"], scores: Float[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """How many items of the same owner stand before each: the higher ones, and of equal ones the earlier.

    Example:
        >>> rank_of_each(np.array([0, 0, 0, 1]), np.array([0.5, 2.0, 1.0, 0.1])).tolist()
        [2, 0, 1, 0]
    """
    order = np.lexsort([np.arange(len(owners)), -scores, owners])
    ranks = np.empty(len(owners), dtype=np.int64)
    ranks[order] = np.arange(len(owners)) - np.searchsorted(owners[order], owners[order])
    return ranks
