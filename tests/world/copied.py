"""A drawn chain with a copied token beside each of its tokens: the smallest union of chains that a tree can grow."""

from dataclasses import dataclass

import numpy as np
import torch

from outrider.core.dice import Dice
from outrider.core.types import Structure
from outrider.trees.protocol import Children, Level, UnprunedTree


@dataclass(frozen=True, kw_only=True)
class CopiedBeside(UnprunedTree):
    """One drawn child, then one that is known beforehand, unless both are one token. Behind the second nothing is
    drafted.
    """

    structure: Structure = "union"

    def choose(self, level: Level, dice: Dice) -> Children:
        drawn = dice.pick(level.drawable, level.draws(level.nodes)).cpu().numpy()
        copied = np.full_like(drawn, (2 * level.depth + 1) % level.drawable.shape[1])
        table = np.stack([drawn, copied], 1)
        parents, ranks = np.nonzero(np.stack([np.full(len(drawn), True), drawn != copied], 1))
        return Children(
            owners=level.owners[parents],
            parents=level.nodes[parents],
            tokens=torch.from_numpy(table[parents, ranks]),
            expand=ranks == 0,
        )
