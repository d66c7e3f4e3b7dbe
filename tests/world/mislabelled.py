"""Trees whose drafts were made in another way than a verifier is told."""

from dataclasses import dataclass

import numpy as np

from outrider.core.dice import Draws, Purpose
from outrider.trees.protocol import Children, UnprunedTree


@dataclass(frozen=True, kw_only=True)
class Relabelled(UnprunedTree):
    """A tree that says its children were made in another way than they were."""

    tree: object
    structure: str

    def choose(self, level, dice):
        return self.tree.choose(level, dice)


@dataclass(frozen=True, kw_only=True)
class ChosenAsDrawn(UnprunedTree):
    """The two likeliest tokens, handed over with their row as if they had been drawn from it."""

    structure: str = "without_replacement"

    def choose(self, level, dice):
        best = level.rows.topk(2).indices
        parents = np.repeat(np.arange(len(best)), 2)
        return Children(
            owners=level.owners[parents],
            parents=level.nodes[parents],
            tokens=best.flatten(),
            expand=np.ones(len(parents), dtype=bool),
        )


@dataclass(frozen=True, kw_only=True)
class Unmerged(UnprunedTree):
    """Independent draws, every one a node of its own."""

    structure: str = "without_replacement"

    def choose(self, level, dice):
        drawn = dice.pick_many(
            level.rows, 2, True, Draws(requests=level.owners, slots=2 * level.nodes, purpose=Purpose.DRAFT)
        )
        parents = np.repeat(np.arange(len(drawn)), 2)
        return Children(
            owners=level.owners[parents],
            parents=level.nodes[parents],
            tokens=drawn.flatten(),
            expand=np.ones(len(parents), dtype=bool),
        )
