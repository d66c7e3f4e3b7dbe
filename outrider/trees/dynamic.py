"""The dynamic tree of EAGLE-2: expand the most promising nodes, then keep the most promising of all."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool

from outrider.core.dice import Dice
from outrider.core.option import check, option
from outrider.core.types import Structure
from outrider.trees.protocol import Children, Grown, Level, check_size
from outrider.trees.ranking import Extensions, best_of_each


@dataclass(frozen=True, kw_only=True)
class DynamicTree:
    """Give the `width` likeliest nodes of each level their `width` likeliest children; of all, keep `num_nodes`.

    A node's likelihood is the product of the drafter's probabilities along its path. It never rises from parent to
    child, so the kept nodes form a tree. Of equally likely nodes the earlier, shallower one is kept.

    References:
        Li et al. 2024, EAGLE-2. https://arxiv.org/abs/2406.16858
    """

    ranked: ClassVar[bool] = True

    width: int = option(10, least=1)
    num_nodes: int = option(60, least=1)

    def __post_init__(self) -> None:
        check(self)
        check_size(max(self.width, self.num_nodes))

    @property
    def structure(self) -> Structure:
        return "deterministic"

    def choose(self, level: Level, dice: Dice) -> Children:
        best = Extensions.of(level, self.width)
        owners = level.owners[best.parents]
        return Children(
            owners=owners,
            parents=level.nodes[best.parents],
            tokens=torch.from_numpy(best.tokens),
            expand=best_of_each(owners, best.logs, self.width),
            values=best.logs[:, None],
        )

    def finish(self, grown: Grown) -> Bool[np.ndarray, " n"]:
        return likeliest_tree(grown, self.num_nodes)


def likeliest_tree(grown: Grown, num_nodes: int) -> Bool[np.ndarray, " n"]:
    """The roots and the `num_nodes` likeliest nodes of each request. A node's first value is the logarithm of its
    likelihood.
    """
    below = grown.depths > 0
    keep = ~below
    if not below.any():
        return keep
    # No child is above its parent, and of equals the earlier wins, so parents are kept with their children. What cannot
    # be, where a constraint or a vocabulary leaves fewer tokens than there are places, is not kept.
    logs = grown.values[below, 0]
    keep[below] = best_of_each(grown.owners[below], logs, num_nodes) & (logs > -np.inf)
    return keep
