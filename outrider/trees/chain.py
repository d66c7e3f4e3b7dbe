"""The chain: one child per node, drawn from the drafter's row, or the drafter's one token."""

from dataclasses import dataclass

import numpy as np
import torch

from outrider.dice import Dice, Draws
from outrider.trees.protocol import Children, Level
from outrider.types import InputError, Structure


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Speculative decoding as first published: a row of tokens, each drawn after the one before.

    References:
        Leviathan et al. 2023. https://arxiv.org/abs/2211.17192
    """

    @property
    def structure(self) -> Structure:
        return "chain"

    def choose(self, level: Level, dice: Dice) -> Children:
        if level.rows is not None:
            everything = np.arange(len(level.nodes))
            tokens = dice.pick(level.rows, Draws(requests=level.owners, slots=level.nodes, purpose="draft"))
            return Children(parents=everything, tokens=tokens, expand=np.ones(len(everything), dtype=bool))
        if level.tokens is None:
            raise InputError("a level has neither rows nor tokens")
        proposed = np.flatnonzero(level.tokens >= 0)
        return Children(
            parents=proposed,
            tokens=torch.from_numpy(level.tokens[proposed]),
            expand=np.ones(len(proposed), dtype=bool),
        )
