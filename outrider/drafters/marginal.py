"""The base of drafters that guess all depths of a draft at once: the row of a depth is the guess at all its nodes."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.core.types import Frontier, Guess, Running, ShortList
from outrider.drafters.protocol import Drafter, Rows
from outrider.trees.chained import Follow


@dataclass(frozen=True, kw_only=True)
class MarginalDrafter(Drafter):
    """Answer `expand` and `chain` from the rows that `begin` made.

    Attributes:
        short_list: The tokens that it can guess; None: all.
    """

    rows: ClassVar[Rows] = "marginal"
    context_pure: ClassVar[bool] = False

    short_list: ShortList | None = None

    @abstractmethod
    def guessed(self, state: Running) -> Float[Tensor, "depth width"] | None:
        """Logits for the depths of a request's last draft; None before any."""

    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        pairs = zip(frontier.owners.tolist(), frontier.depths.tolist(), strict=True)
        rows = [self.row(states[owner], depth) for owner, depth in pairs]
        return Guess(logits=torch.stack(rows), short_list=self.short_list)

    def chain(self, states: Sequence[Running], counts: Sequence[int]) -> Follow:
        depths = iter(range(1, max(counts) + 1))

        def step(tokens: Int[Tensor, " n"]) -> Float[Tensor, "n width"]:
            depth = next(depths)
            pairs = zip(states, counts, strict=True)
            return torch.stack([self.row(state, depth) for state, count in pairs if count >= depth])

        return step

    def row(self, state: Running, depth: int) -> Float[Tensor, " width"]:
        """The guess at the nodes of a depth."""
        rows = self.guessed(state)
        if rows is None:
            raise RuntimeError("all depths are guessed before nodes are expanded")
        return rows[depth]
