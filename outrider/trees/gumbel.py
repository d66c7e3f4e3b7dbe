"""Children drawn without replacement, a fixed number per depth (RSD-C; MCSD without replacement)."""

import itertools
import operator
from dataclasses import dataclass

import numpy as np
import torch

from outrider.core.dice import Dice
from outrider.core.types import InputError, Structure
from outrider.trees.protocol import Children, Level, UnprunedTree, check_size, nothing


@dataclass(frozen=True, kw_only=True)
class GumbelTree(UnprunedTree):
    """A node at depth d gets `branching[d]` distinct children, drawn one after the other from the rest of its row.

    Keeping the k largest of a row's log-probabilities with Gumbel noise, in descending order, has the same law. Drawing
    in turn can be enumerated, and reads the row once. The tree is as deep as the list is long, or as the length policy
    allows if that is less.

    References:
        Jeon et al. 2024, RSD-C. https://arxiv.org/abs/2402.14160
        Yang et al. 2024, MCSD. https://arxiv.org/abs/2401.06706
    """

    branching: tuple[int, ...] = (3, 2, 1, 1)

    def __post_init__(self) -> None:
        if not self.branching or min(self.branching) < 1:
            raise InputError(f"branching must name at least one count, each >= 1, got {self.branching}")
        check_size(sum(itertools.accumulate(self.branching, operator.mul)))

    @property
    def structure(self) -> Structure:
        return "without_replacement"

    def choose(self, level: Level, dice: Dice) -> Children:
        if level.depth >= len(self.branching):
            return nothing(level)
        draws = level.draws(level.nodes * max(self.branching))
        return drawn(level, dice.pick_many(level.drawable, self.branching[level.depth], False, draws).cpu().numpy())


def drawn(level: Level, tokens: np.ndarray) -> Children:
    """Children from a table of draws, one row per node; -1 is none."""
    parents, ranks = np.nonzero(tokens >= 0)
    return Children(
        owners=level.owners[parents],
        parents=level.nodes[parents],
        tokens=torch.from_numpy(tokens[parents, ranks]),
        expand=np.ones(len(parents), dtype=bool),
    )
