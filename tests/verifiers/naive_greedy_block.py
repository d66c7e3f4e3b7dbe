"""Naive twin of the greedy block rule, with what one step owes to the next ones; a coin's slot is its position."""

from itertools import pairwise

import numpy as np

from tests.verifiers.choices import Choices
from tests.verifiers.naive_trees import Tree

Carried = tuple[tuple[float, int], ...]
"""Modifications of the target still in force, oldest first: the joint ratio R so far and how many positions remain."""


def greedy_block(tree: Tree, dice: Choices, carried: Carried) -> tuple[list[int], Carried]:
    """Sun et al. 2024, appendix: the block rule that is best for one block and borrows from the next ones.

    A chain only. Each modification turns the row after a prefix z into (R(z) p - q)_+, R(z) being the joint ratio of
    all that was emitted since its block began; the newer ones build on the older ones' rows.
    """
    path = [0]
    while tree.children[path[-1]]:
        path += tree.children[path[-1]]
    gamma, tokens = len(path) - 1, [tree.tokens[node] for node in path[1:]]
    q = [tree.drawn_from(node, child) for node, child in pairwise(path)]
    ratios = [[R for R, _ in carried]]
    before: list[list[np.ndarray]] = []
    P: list[np.ndarray] = []
    R = [1.0]
    for i in range(gamma + 1):
        row, stages = tree.p[path[i]], list[np.ndarray]()
        for (_, remaining), weight in zip(carried, ratios[i], strict=True):
            stages.append(row)
            if i < remaining:
                if i == gamma:
                    raise ValueError("a modification reaches beyond the drafted rows")
                row = _modified(row, q[i], weight)
        before.append(stages)
        P.append(row)
        if i < gamma:
            x = tokens[i]
            ratios.append([_times(weight, p[x], q[i][x]) for weight, p in zip(ratios[i], stages, strict=True)])
            R.append(_times(R[i], row[x], q[i][x]))
    tau = gamma
    while tau > 0:
        if tau == gamma:
            h = min(1.0, R[gamma])
        else:
            remaining_mass = float(np.maximum(R[tau] * P[tau] - q[tau], 0).sum())
            rejected_mass = float(np.maximum(q[tau] - R[tau] * P[tau], 0).sum())
            h = min(1.0, remaining_mass / rejected_mass) if rejected_mass > 0 else 1.0
        if dice.coin(h, tau - 1):
            break
        tau -= 1
    if tau == gamma:
        return [*tokens, dice.pick(P[gamma], 0)], ()
    y = dice.pick(_modified(P[tau], q[tau], R[tau]), 0)
    after = [
        (_times(weight, p[y], q[tau][y]), remaining - tau - 1)
        for weight, p, (_, remaining) in zip(ratios[tau], before[tau], carried, strict=True)
    ]
    after.append((_times(R[tau], P[tau][y], q[tau][y]), gamma - tau - 1))
    return [*tokens[:tau], y], tuple((weight, remaining) for weight, remaining in after if remaining > 0)


def greedy_block_once(tree: Tree, dice: Choices) -> list[int]:
    """The tokens that the rule emits in one step that owes nothing."""
    return greedy_block(tree, dice, ())[0]


def _times(weight: float, p: float, q: float) -> float:
    """weight * p / q; infinite, and from then on, where the draft could not have drawn the token."""
    return float(weight * p / q) if q > 0 and np.isfinite(weight) else float("inf")


def _modified(p: np.ndarray, q: np.ndarray, weight: float) -> np.ndarray:
    """(weight p - q)_+ normalised; p itself for an infinite weight, and where nothing is left."""
    if np.isinf(weight):
        return p
    left = np.maximum(weight * p - q, 0)
    return left / left.sum() if left.sum() > 0 else p
