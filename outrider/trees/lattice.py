"""The best prefixes of a lattice of per-position rows, under a budget of nodes (DDTree)."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from outrider.core.dice import Dice
from outrider.core.option import check, option
from outrider.core.types import Structure
from outrider.trees.dynamic import likeliest_tree
from outrider.trees.protocol import Children, Grown, Level, check_size
from outrider.trees.ranking import Likeliest


@dataclass(frozen=True, kw_only=True)
class LatticeTree:
    """Take one row per position, and keep the `num_nodes` prefixes with the largest product of probabilities.

    A drafter of marginals has one row per position. Any other drafter gives the rows along its own likeliest path. A
    prefix is never likelier than its parent, so the best prefixes form a tree, and those of one depth are among the
    best `num_nodes` of that depth.

    References:
        Ringel and Romano 2026, DDTree. https://arxiv.org/abs/2604.12989
    """

    num_nodes: int = option(32, least=1)

    def __post_init__(self) -> None:
        check(self)
        check_size(self.num_nodes)

    @property
    def structure(self) -> Structure:
        return "deterministic"

    def choose(self, level: Level, dice: Dice) -> Children:
        best = Likeliest.of(level, self.num_nodes)
        before = level.so_far()
        extensions = []
        for row, owner in enumerate(level.owners.tolist()):
            above = np.flatnonzero((before.owners == owner) & (before.depths == level.depth))
            extensions.append(self._extend(before.nodes[above], before.values[above].sum(1), best.logs[row]))
        owners = np.repeat(level.owners, [len(m.parents) for m in extensions])
        return Children(
            owners=owners,
            parents=np.concatenate([m.parents for m in extensions]),
            tokens=torch.from_numpy(np.concatenate([best.tokens[row, m.ranks] for row, m in enumerate(extensions)])),
            expand=np.concatenate([np.arange(len(m.parents)) == 0 for m in extensions]),
            values=np.concatenate([m.logs for m in extensions])[:, None],
        )

    def finish(self, grown: Grown) -> Bool[np.ndarray, " n"]:
        return likeliest_tree(grown, self.num_nodes)

    def _extend(
        self,
        nodes: Int[np.ndarray, " n"],
        above: Float[np.ndarray, " n"],
        logs: Float[np.ndarray, " ranks"],
    ) -> "_Prefixes":
        """The best prefixes one token longer, the likeliest path first."""
        logs = logs[logs > -np.inf]
        order = np.argsort(-above, kind="stable")
        # Of the i-th prefix and the j-th token, (i + 1)(j + 1) - 1 pairs are at least as good.
        i, j = np.nonzero(np.arange(1, len(order) + 1)[:, None] * np.arange(1, len(logs) + 1) <= self.num_nodes)
        sums = above[order[i]] + logs[j]
        best = np.argsort(-sums, kind="stable")[: self.num_nodes]
        return _Prefixes(parents=nodes[order[i[best]]], ranks=j[best], logs=sums[best])


@dataclass(frozen=True, kw_only=True)
class _Prefixes:
    """Prefixes of one depth: the node that each extends, the rank of its token, its log-probability."""

    parents: Int[np.ndarray, " n"]
    ranks: Int[np.ndarray, " n"]
    logs: Float[np.ndarray, " n"]
