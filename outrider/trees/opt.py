"""OPT-Tree: grow the tree that maximises the expected acceptance, and stop when a level no longer pays."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from outrider.core.dice import Dice
from outrider.core.option import check, option
from outrider.core.types import Structure
from outrider.trees.dynamic import likeliest_tree
from outrider.trees.protocol import Children, Grown, Level, check_size, nothing
from outrider.trees.ranking import Extensions, best_of_each


@dataclass(frozen=True, kw_only=True)
class OptTree:
    r"""Expand the `num_nodes` likeliest nodes of each level; keep the `num_nodes` likeliest of all.

    With the drafter's probabilities in place of the target's, the expected number of accepted tokens is the sum of the
    nodes' path probabilities. A request goes one level deeper if the last level raised the sum over its best
    `num_nodes` nodes by more than `threshold`. `threshold` is the cost of a level, in tokens.

    References:
        Wang et al. 2024, OPT-Tree. https://arxiv.org/abs/2406.17276
    """

    num_nodes: int = option(30, least=1)
    threshold: float = option(0.3, least=0)

    def __post_init__(self) -> None:
        check(self)
        check_size(self.num_nodes)

    @property
    def structure(self) -> Structure:
        return "deterministic"

    def choose(self, level: Level, dice: Dice) -> Children:
        before = level.so_far()
        weights = np.where(before.depths > 0, np.exp(before.values.sum(1)), 0.0)
        best = Extensions.of(level, self.num_nodes)
        kept = best_of_each(level.owners[best.parents], best.logs, self.num_nodes)
        parents, tokens, logs = best.parents[kept], best.tokens[kept], best.logs[kept]
        owners = level.owners[parents]
        last = _sums(before.owners, weights, self.num_nodes)
        now = _sums(np.concatenate([before.owners, owners]), np.concatenate([weights, np.exp(logs)]), self.num_nodes)
        if not len(owners):
            return nothing(level)
        return Children(
            owners=owners,
            parents=level.nodes[parents],
            tokens=torch.from_numpy(tokens),
            expand=(now - last > self.threshold)[owners],
            values=logs[:, None],
        )

    def finish(self, grown: Grown) -> Bool[np.ndarray, " n"]:
        return likeliest_tree(grown, self.num_nodes)


def _sums(owners: Int[np.ndarray, " n"], weights: Float[np.ndarray, " n"], count: int) -> Float[np.ndarray, " owners"]:
    """Sum of the `count` largest weights of each owner."""
    best = best_of_each(owners, weights, count)
    return np.bincount(owners[best], weights=weights[best], minlength=int(owners.max()) + 1)
