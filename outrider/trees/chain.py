"""The chain: one child per node, drawn from the drafter's row, or the drafter's one token."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.core.dice import Dice, Draws, Pick, Purpose
from outrider.core.types import Structure
from outrider.trees.protocol import Children, Level, UnprunedTree
from outrider.trees.shape import chain_shape


@dataclass(frozen=True, kw_only=True)
class ChainTree(UnprunedTree):
    """Speculative decoding as first published: a chain of tokens, each drawn after the one before.

    References:
        Leviathan et al. 2023. https://arxiv.org/abs/2211.17192
    """

    @property
    def structure(self) -> Structure:
        return "chain"

    def choose(self, level: Level, dice: Dice) -> Children:
        if level.proposed is None:
            draws = level.draws(level.nodes)
            tokens = dice.pick(level.drawable, draws)
            owners, parents = level.owners, level.nodes
        else:
            there = np.flatnonzero(level.proposed >= 0)
            tokens = torch.from_numpy(level.proposed[there])
            owners, parents = level.owners[there], level.nodes[there]
        return Children(owners=owners, parents=parents, tokens=tokens, expand=np.ones(len(owners), dtype=bool))

    def picks(self, limits: Sequence[int], dice: Dice, device: torch.device) -> list[Pick]:
        """The draws of chains with known lengths, level by level: those that `choose` would make.

        Args:
            limits: How many tokens are drawn for each request of the batch.
            device: Where rows are.
        """
        shape = chain_shape(tuple(limits))
        draws = Draws(requests=shape.owners, slots=shape.numbers, purpose=Purpose.DRAFT, depths=shape.numbers)
        return dice.picks(draws, [len(level.owners) for level in shape.levels], device)
