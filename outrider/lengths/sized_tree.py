"""A tree with the nodes and levels that pay, by what its nodes promise and by what steps cost (Wang et al. 2024)."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Int

from outrider.core.dice import Dice
from outrider.core.types import Structure
from outrider.lengths.acceptance import LOWEST, with_odds
from outrider.trees.protocol import Children, Grown, Level, RankedTree
from outrider.trees.ranking import rank_of_each


@dataclass(frozen=True, kw_only=True)
class SizedTree:
    r"""Grows as another tree does, in one step of some requests, and leaves out what does not pay.

    A node's chance c to be accepted is the product of its path's probabilities. They are the drafter's, and their odds
    are multiplied by what such promises were worth. The n likeliest nodes of a request bring $\sum_{i \le n} c_i$
    tokens. To verify them takes $t_n$ seconds, in which steps bring $\rho\, t_n$ tokens otherwise. So the request keeps
    the n nodes with the largest $\sum_{i \le n} c_i - \rho\, t_n$.

    Of a new level, the nodes that would be kept are expanded if a further level seems to pay: it is taken to add what
    this one added, times what the chances of this level are of those of the level above. That must be more than what
    steps bring otherwise while the drafter reads these nodes.

    No drawn token is read. So rules for trees of chosen tokens keep the law.

    Attributes:
        tree: What chooses children.
        odds: By what the odds of each request's promises are multiplied.
        rates: $\rho$ for each request: tokens per second of the step's requests together. 0 leaves nothing out.
        verifying: $t_n$ for n = 0, 1, ...
        reading: Seconds in which the drafter reads so many nodes of so many requests, by their depth.

    References:
        Wang et al. 2024, OPT-Tree. https://arxiv.org/abs/2406.17276
    """

    tree: RankedTree
    odds: Float[np.ndarray, " requests"]
    rates: Float[np.ndarray, " requests"]
    verifying: Float[np.ndarray, " sizes"]
    reading: Callable[[int, int], Float[np.ndarray, " depths"]]

    @property
    def structure(self) -> Structure:
        return self.tree.structure

    def choose(self, level: Level, dice: Dice) -> Children:
        children = self.tree.choose(level, dice)
        if children.values is None or not len(children.owners):
            return children
        owners, requests = children.owners, len(self.rates)
        # A node's values: the logarithm that the tree stored, its calibrated chance, and its chance behind its parent.
        parents = _places(level, children)
        above = level.values if level.depth else np.tile([0.0, 1.0, 1.0], (len(level.owners), 1))
        own = np.exp(children.values[:, 0] - above[parents, 0])
        likely = with_odds(np.minimum(own, 1 - LOWEST), self.odds[owners])
        # Of the children of a node, one is accepted at most.
        likely /= np.maximum(np.bincount(parents, likely), 1.0)[parents]
        chances = above[parents, 1] * likely
        before = level.so_far()
        earlier = _chances(before)
        last = self._size(before.owners, earlier)
        now = self._size(np.concatenate([before.owners, owners]), np.concatenate([earlier, chances]))
        upper, lower = now.kept[: len(earlier)] & (before.depths == level.depth), now.kept[len(earlier) :]
        mass = np.bincount(owners, chances * lower, requests)
        mass_above = np.bincount(before.owners, earlier * upper, requests) if level.depth else np.ones(requests)
        gain = (now.worth - last.worth) * np.minimum(mass / np.maximum(mass_above, 1e-30), 1.0)
        expand = children.expand & lower
        read = np.bincount(owners[expand], minlength=requests)
        if read.any():
            seconds = self.reading(int(read.sum()), int((read > 0).sum()))[level.depth + 1] * read / read.sum()
            expand &= (gain > self.rates * seconds)[owners]
        return replace(children, expand=expand, values=np.stack([children.values[:, 0], chances, own], 1))

    def finish(self, grown: Grown) -> Bool[np.ndarray, " n"]:
        roots = grown.depths == 0
        return roots if roots.all() else roots | self._size(grown.owners, _chances(grown), least=1).kept

    def chances(self, grown: Grown) -> Float[np.ndarray, " n"]:
        """How likely each node is behind its parent, by the drafter; 0 of roots."""
        return grown.values[:, 2] if grown.values.shape[1] else np.zeros(len(grown.owners))

    def _size(self, owners: Int[np.ndarray, " n"], chances: Float[np.ndarray, " n"], least: int = 0) -> "_Size":
        """Which nodes to keep, at least so many of each request.

        Args:
            chances: Of each node; 0 of roots.
        """
        ranks, most = rank_of_each(owners, chances), min(self.tree.num_nodes, len(self.verifying) - 1)
        table = np.zeros((len(self.rates), most + 1))
        likeliest = ranks < most
        table[owners[likeliest], ranks[likeliest] + 1] = chances[likeliest]
        worth = np.cumsum(table, axis=1) - self.rates[:, None] * self.verifying[: most + 1]
        sizes = least + worth[:, least:].argmax(1)
        return _Size(
            kept=(ranks < sizes[owners]) & (chances > 0),
            worth=np.take_along_axis(worth, sizes[:, None], 1)[:, 0],
        )


@dataclass(frozen=True, kw_only=True)
class _Size:
    """Which nodes to keep, and how many tokens more than other steps these bring to each request."""

    kept: Bool[np.ndarray, " n"]
    worth: Float[np.ndarray, " requests"]


def _chances(grown: Grown) -> Float[np.ndarray, " n"]:
    """The calibrated chance of each node; 0 of roots."""
    return grown.values[:, 1] if grown.values.shape[1] else np.zeros(len(grown.owners))


def _places(level: Level, children: Children) -> Int[np.ndarray, " m"]:
    """The place in a level of each child's parent."""
    count = int(level.nodes.max()) + 1
    places: Int[np.ndarray, " m"] = np.searchsorted(
        level.owners * count + level.nodes, children.owners * count + children.parents
    )
    return places
