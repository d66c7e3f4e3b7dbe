"""The interface of trees: choose the children of new nodes, choose which to expand, choose which to keep."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.core.dice import Dice, Draws, Purpose
from outrider.core.inputs import shown
from outrider.core.types import Choices, InputError, Structure
from outrider.lm.slots.slots import BRANCHES


def check_size(num_nodes: int) -> None:
    """Raise InputError for a tree that no slot of the target has room for."""
    if num_nodes > BRANCHES:
        raise InputError(
            f"a tree may have {BRANCHES} nodes, for which a slot has room; this one has {shown(num_nodes)}"
        )


def union_structure(drawn: Structure) -> Structure:
    """How the children of a union are made, by how those of its drawn draft are. Copies are chosen too."""
    return "union" if drawn == "chain" else drawn


@dataclass(frozen=True, kw_only=True)
class Grown:
    """All nodes so far, level by level, the roots first. Within a level, nodes are grouped by request.

    Attributes:
        owners: Index of each node's request in the batch.
        nodes: Number of the node in its request's tree, in growth order; the root is 0.
        parents: Number of its parent; -1 for roots.
        depths: Distance from the root.
        values: The values that the tree stored for each node; 0 at roots.
    """

    owners: Int[np.ndarray, " n"]
    nodes: Int[np.ndarray, " n"]
    parents: Int[np.ndarray, " n"]
    depths: Int[np.ndarray, " n"]
    values: Float[np.ndarray, "n values"]


@dataclass(frozen=True, kw_only=True)
class Level:
    """The nodes that were just expanded, of all requests; all have the same depth.

    Attributes:
        owners: Index of each node's request in the batch; ascending.
        nodes: Number of the node in its request's tree.
        depth: Distance from the root.
        values: The values that the tree stored for each node.
        logits: The drafter's raw logits, on the device; None if it proposes tokens.
        proposed: The one token that a point drafter proposes; -1 for none.
        choices: The few tokens that a point drafter proposes for a tree.
        rows: Distributions to draw children from; None if children are chosen, not drawn.
        so_far: All nodes so far.
        survival: The drafter's estimate of the probability that a child is accepted, with all nodes above it; None: it
            makes none.
    """

    owners: Int[np.ndarray, " n"]
    nodes: Int[np.ndarray, " n"]
    depth: int
    values: Float[np.ndarray, "n values"]
    logits: Float[Tensor, "n vocab"] | None
    proposed: Int[np.ndarray, " n"] | None
    rows: Float[Tensor, "n vocab"] | None
    so_far: Callable[[], Grown]
    survival: Float[Tensor, " n"] | None = None
    choices: Choices | None = None

    def draws(self, slots: Int[np.ndarray, " n"]) -> Draws:
        """The keys of draws of children, one per node."""
        depths = np.full(len(self.owners), self.depth)
        return Draws(requests=self.owners, slots=slots, purpose=Purpose.DRAFT, depths=depths)

    @cached_property
    def scores(self) -> Float[Tensor, "n vocab"]:
        """Log-softmax of the raw logits, for chosen children and stopping rules, at every temperature."""
        return (self.raw if self.raw.dtype == torch.float64 else self.raw.float()).log_softmax(-1)

    @property
    def raw(self) -> Float[Tensor, "n vocab"]:
        """The logits. Raises InputError if there are none."""
        if self.logits is None:
            raise InputError("this tree needs distributions, and the drafter proposes single tokens; use tree 'chain'")
        return self.logits

    @property
    def drawable(self) -> Float[Tensor, "n vocab"]:
        """The rows. Raises InputError if there are none."""
        if self.rows is None:
            raise InputError("this tree draws from distributions, and the drafter has none; use tree 'chain'")
        return self.rows


@dataclass(frozen=True, kw_only=True)
class Children:
    """New nodes, one level deeper, grouped by request; siblings in drawing order.

    Attributes:
        owners: Index of each node's request in the batch; ascending.
        parents: Number of its parent, which can be any node of the level above.
        tokens: Token of each.
        expand: Which of them the drafter expands.
        values: Values that the tree stores for them.
        links: Indices into the children in drawing order; a repeated draw repeats its index. None: each child once.
    """

    owners: Int[np.ndarray, " m"]
    parents: Int[np.ndarray, " m"]
    tokens: Int[Tensor, " m"]
    expand: Bool[np.ndarray, " m"]
    values: Float[np.ndarray, "m values"] | None = None
    links: Int[np.ndarray, " links"] | None = None


@runtime_checkable
class Tree(Protocol):
    """A way of growing drafts. Pure: its decisions depend on the level alone. One that is a `RankedTree` says so by an
    attribute `ranked`.
    """

    @property
    def structure(self) -> Structure:
        """How children are made. For drawn children, the verifier gets the rows that they were drawn from."""
        ...

    def choose(self, level: Level, dice: Dice) -> Children:
        """Choose the children of a level's nodes."""
        ...

    def finish(self, grown: Grown) -> Bool[np.ndarray, " n"] | None:
        """Which nodes to keep, each with its parent; None keeps all. Only chosen nodes may be dropped, because whether
        a drawn node exists must not depend on its token.
        """
        ...


@runtime_checkable
class RankedTree(Tree, Protocol):
    """A tree of the likeliest nodes: the only value of a node is the logarithm of the drafter's probability of its
    path, and of all nodes the likeliest are kept.

    Attributes:
        num_nodes: How many are kept.
    """

    @property
    def num_nodes(self) -> int: ...


class UnprunedTree:
    """The base of trees that keep all their nodes."""

    def finish(self, grown: Grown) -> None:
        return None


def nothing(level: Level) -> Children:
    """No children."""
    none = np.zeros(0, dtype=np.int64)
    return Children(owners=none, parents=none, tokens=torch.from_numpy(none), expand=none.astype(bool))
