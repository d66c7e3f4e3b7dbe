"""What the growth loop asks of a tree: which children each new node gets, and which of them to expand."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.dice import Dice
from outrider.types import Structure


@dataclass(frozen=True, kw_only=True)
class Level:
    """Nodes that were just expanded, over all requests; either rows to draw from, or one token each.

    Attributes:
        owners: Index of each node's request in the batch; ascending.
        nodes: Number of the node in its request's tree, in growth order; the root is 0.
        depths: Distance from the root.
        rows: Distributions that children may be drawn from.
        tokens: The one token that a point drafter proposes.
    """

    owners: Int[np.ndarray, " n"]
    nodes: Int[np.ndarray, " n"]
    depths: Int[np.ndarray, " n"]
    rows: Float[Tensor, "n vocab"] | None
    tokens: Int[np.ndarray, " n"] | None


@dataclass(frozen=True, kw_only=True)
class Children:
    """New nodes, siblings in drawing order.

    Attributes:
        parents: Index into the level; ascending.
        tokens: Token of each.
        expand: Which of them the drafter should look beyond.
    """

    parents: Int[np.ndarray, " m"]
    tokens: Int[Tensor, " m"]
    expand: Bool[np.ndarray, " m"]


@runtime_checkable
class Tree(Protocol):
    """A way of growing. Pure: what it needs to know is in the level."""

    @property
    def structure(self) -> Structure: ...

    def choose(self, level: Level, dice: Dice) -> Children:
        """Name the children of a level's nodes."""
        ...
