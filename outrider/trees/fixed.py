"""A given topology (Sequoia, Medusa), and the dynamic programme that finds the best one (Sequoia)."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch
from jaxtyping import Float, Int

from outrider.core.dice import Dice
from outrider.core.types import InputError, Structure
from outrider.trees.protocol import Children, Level, UnprunedTree, check_size, nothing
from outrider.trees.ranking import Likeliest


@dataclass(frozen=True, kw_only=True)
class FixedTree(UnprunedTree):
    """The same tree at every step: `children` lists how many children each node has, breadth first from the root.

    Children are drawn without replacement; with `chosen` they are the likeliest tokens. `2x1x0x0` is a root with two
    children, and the first of these has one child. Zeros at the end may be left out.

    References:
        Chen et al. 2024, Sequoia. https://arxiv.org/abs/2402.12374
        Cai et al. 2024, Medusa. https://arxiv.org/abs/2401.10774
    """

    children: tuple[int, ...] = (4, 2, 1, 1, 0, 2, 1, 1, 1, 1)
    chosen: bool = False

    def __post_init__(self) -> None:
        reached = 1
        for node, count in enumerate(self.children):
            if count < 0 or node >= reached:
                raise InputError(
                    f"children must list counts >= 0 breadth first, no more than there are nodes; {self.children} has "
                    f"{reached} nodes before its entry {node}"
                )
            reached += count
        if reached == 1:
            raise InputError("children must give the root at least one child")
        check_size(reached - 1)

    @property
    def structure(self) -> Structure:
        return "deterministic" if self.chosen else "without_replacement"

    @cached_property
    def first(self) -> Int[np.ndarray, " nodes"]:
        """For every node with an entry, the breadth-first number of its first child."""
        return 1 + np.concatenate([[0], np.cumsum(self.children)[:-1]])

    def choose(self, level: Level, dice: Dice) -> Children:
        at = level.values[:, 0].astype(np.int64) if level.depth else np.zeros(len(level.nodes), dtype=np.int64)
        counts = np.array([self.children[node] if node < len(self.children) else 0 for node in at.tolist()])
        most = int(counts.max(initial=0))
        if most == 0:
            return nothing(level)
        if self.chosen:
            table = Likeliest.of(level, most).tokens
        else:
            draws = level.draws(at * max(self.children))
            table = dice.pick_many(level.drawable, most, False, draws).cpu().numpy()
        parents, ranks = np.nonzero((np.arange(table.shape[1]) < counts[:, None]) & (table >= 0))
        numbers = self.first[at[parents]] + ranks
        inner = np.array([node < len(self.children) and self.children[node] > 0 for node in numbers.tolist()])
        return Children(
            owners=level.owners[parents],
            parents=level.nodes[parents],
            tokens=torch.from_numpy(table[parents, ranks]),
            expand=inner.astype(bool),
            values=numbers[:, None].astype(float),
        )


def likeliest_topology(accuracies: Float[np.ndarray, "depths ranks"], num_nodes: int) -> tuple[int, ...]:
    r"""The `children` of the sparse tree that holds the accepted path most often, by measured accuracies (Medusa).

    With $a_{d,k}$ the probability that the k-th likeliest token at depth d is the one that comes, a node with the ranks
    $k_1 \ldots k_d$ is accepted with about $\prod_i a_{i,k_i}$. The tree has the nodes with the largest products.

    Args:
        accuracies: $a_{d,k}$; a rank is never likelier than the one before it.
        num_nodes: Draft nodes.

    Example:
        >>> likeliest_topology(np.array([[0.6, 0.2], [0.5, 0.1]]), num_nodes=3)
        (2, 1)

    References:
        Cai et al. 2024, Medusa, section 2.3.3. https://arxiv.org/abs/2401.10774
    """
    depths, ranks = accuracies.shape
    falling = np.minimum.accumulate(accuracies, 1)
    chosen: list[tuple[int, ...]] = []
    # The best nodes whose parents and smaller siblings are in the tree.
    open_nodes: list[tuple[float, tuple[int, ...]]] = [(-float(falling[0, 0]), (0,))]
    while open_nodes and len(chosen) < num_nodes:
        product, path = heapq.heappop(open_nodes)
        chosen.append(path)
        rank, depth = path[-1], len(path)
        if rank + 1 < ranks and falling[depth - 1, rank] > 0:
            ratio = falling[depth - 1, rank + 1] / falling[depth - 1, rank]
            heapq.heappush(open_nodes, (product * float(ratio), (*path[:-1], rank + 1)))
        if depth < depths:
            heapq.heappush(open_nodes, (product * float(falling[depth, 0]), (*path, 0)))
    counts: list[int] = []
    level: list[tuple[int, ...]] = [()]
    while level:
        families = [sorted(p for p in chosen if len(p) == len(above) + 1 and p[:-1] == above) for above in level]
        counts += [len(family) for family in families]
        level = [path for family in families for path in family]
    while counts and counts[-1] == 0:
        counts.pop()
    return tuple(counts)


def best_topology(
    acceptance: Sequence[float], num_nodes: int, depth: int, draft_cost: float, target_costs: Sequence[float]
) -> tuple[int, ...]:
    r"""The `children` of the tree with the most tokens per second, by Sequoia's dynamic programme.

    With $a_j$ the measured probability that the j-th of a node's children is the accepted one, $T(m, l, b)$ is the
    largest expected number of tokens from m nodes, root included, in l levels, if the root has b children:
    $T(1, l, 0) = 1$ and $T(m, l, b) = \max_y T(y, l, b-1) + a_b \max_{b'} T(m-y, l-1, b')$.
    The tree minimises $(l\,c + v_m) / T$ over its size m and its depth l.

    Args:
        acceptance: $a_1, a_2, \ldots$
        num_nodes: Most draft nodes.
        depth: Deepest tree.
        draft_cost: c, the cost of drafting one level.
        target_costs: $v_1 \ldots$, the cost of a target forward over 1, 2, ... nodes, the root included; at least
            `num_nodes + 1` of them, in the same unit.

    Example:
        >>> best_topology([0.9], num_nodes=3, depth=3, draft_cost=0.0, target_costs=[1, 1, 1, 1])
        (1, 1, 1)

    References:
        Chen et al. 2024, Sequoia, section 3.1. https://arxiv.org/abs/2402.12374
    """
    if len(target_costs) <= num_nodes:
        raise InputError(f"{num_nodes} drafted nodes need {num_nodes + 1} target_costs, got {len(target_costs)}")

    @cache
    def most(m: int, levels: int, b: int) -> tuple[float, int]:
        """T(m, levels, b) and the y with which it is reached."""
        if b == 0:
            return (1.0, 0) if m == 1 else (-np.inf, 0)
        if levels == 0 or m < 1 + b or b > len(acceptance):
            return -np.inf, 0
        options = [(most(y, levels, b - 1)[0] + acceptance[b - 1] * best(m - y, levels - 1)[0], y) for y in range(b, m)]
        return max(options)

    @cache
    def best(m: int, levels: int) -> tuple[float, int]:
        """The best T over the number of children of the root, and that number."""
        return max((most(m, levels, b)[0], -b) for b in range(min(m, len(acceptance) + 1)))

    sizes = [
        ((levels * draft_cost + target_costs[m - 1]) / best(m, levels)[0], m, levels)
        for m in range(2, num_nodes + 2)
        for levels in range(1, depth + 1)
        if best(m, levels)[0] > 0
    ]
    _, m, levels = min(sizes)
    counts, queue = [], [(m, levels)]
    while queue:
        size, left = queue.pop(0)
        b = -best(size, left)[1]
        counts.append(b)
        subtrees = []
        while b:
            y = most(size, left, b)[1]
            subtrees.append((size - y, left - 1))
            size, b = y, b - 1
        queue += subtrees[::-1]
    while counts[-1] == 0:
        counts.pop()
    return tuple(counts)
