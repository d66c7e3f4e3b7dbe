"""The top n-1 tokens of each row and one draw from the rest (Hu et al. 2025)."""

from dataclasses import dataclass

import numpy as np
import torch

from outrider.core.dice import Dice
from outrider.core.option import check, option
from outrider.core.types import Structure
from outrider.trees.gumbel import drawn
from outrider.trees.protocol import Children, Level, UnprunedTree, check_size


@dataclass(frozen=True, kw_only=True)
class TopPlusOneTree(UnprunedTree):
    """Each node gets its `width - 1` likeliest tokens, then one drawn from the row without them.

    If the rest of the row has no mass, the node gets only its likeliest tokens. `width` children per node over d levels
    make `width + width^2 + ... + width^d` nodes.

    References:
        Hu et al. 2025, greedy multi-draft sampling. https://arxiv.org/abs/2502.18779
        Sun et al. 2024, SpecHub, for width 2. https://arxiv.org/abs/2411.05289
    """

    width: int = option(2, least=1)

    def __post_init__(self) -> None:
        check(self)
        check_size(self.width)

    @property
    def structure(self) -> Structure:
        return "top_plus_one"

    def choose(self, level: Level, dice: Dice) -> Children:
        rows = level.drawable
        top = rows.topk(min(self.width - 1, rows.shape[1]), -1)
        rest = rows.scatter(1, top.indices, 0.0)
        draws = level.draws(level.nodes)
        last = dice.pick_many(rest, 1, False, draws)
        chosen = torch.where(top.values > 0, top.indices, -1)
        return drawn(level, torch.cat([chosen, last], 1).cpu().numpy().astype(np.int64))
