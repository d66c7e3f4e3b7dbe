"""The topology of chains of known lengths, which the same lengths share."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int


@dataclass(frozen=True, kw_only=True)
class ChainLevel:
    """The nodes of one depth that have a child.

    Attributes:
        owners: The requests of these nodes.
        above: For each of them, the place of the same request at the level above; None if they are the same requests.
    """

    owners: Sequence[int]
    above: Int[np.ndarray, " n"] | None


@dataclass(frozen=True, kw_only=True)
class ChainShape:
    """The topology of some chains, packed request by request as in `Draft`. It is shared, so nobody changes it.

    Attributes:
        parents: Packed index of each node's parent; -1 for roots.
        depths: Distance from the root, which is also the node's number.
        offsets: Where each request's nodes begin; the last entry is the number of nodes.
        first_child: `links[first_child[n] : first_child[n + 1]]` is the child of n.
        links: Packed indices of children.
        row_of: Per node, the place of its row if rows are packed level by level; -1 for the end of a chain.
        place: Per node, its place if nodes are packed level by level.
        levels: The nodes that have a child, level by level, the roots first.
        owners: The request of each of these nodes.
        numbers: The number of each of them.
    """

    parents: Int[np.ndarray, " nodes"]
    depths: Int[np.ndarray, " nodes"]
    offsets: Int[np.ndarray, " bounds"]
    first_child: Int[np.ndarray, " node_bounds"]
    links: Int[np.ndarray, " links"]
    row_of: Int[np.ndarray, " nodes"]
    place: Int[np.ndarray, " nodes"]
    levels: Sequence[ChainLevel]
    owners: Int[np.ndarray, " links"]
    numbers: Int[np.ndarray, " links"]


@functools.lru_cache(maxsize=256)
def chain_shape(lengths: tuple[int, ...]) -> ChainShape:
    """The topology of chains of these lengths, one per request; 0 is a root alone.

    Example:
        >>> shape = chain_shape((2, 1))
        >>> shape.parents.tolist(), shape.row_of.tolist(), [level.owners for level in shape.levels]
        ([-1, 0, 1, -1, 3], [0, 2, -1, 1, -1], [[0, 1], [0]])
    """
    sizes = np.array(lengths, dtype=np.int64) + 1
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    owners = np.repeat(np.arange(len(sizes)), sizes)
    number = np.arange(len(owners))
    depths = number - offsets[owners]
    inner = depths < sizes[owners] - 1
    by_level = np.lexsort((owners, depths))
    drawn = by_level[inner[by_level]]
    place, row_of = np.empty_like(number), np.full(len(number), -1)
    place[by_level], row_of[drawn] = number, np.arange(len(drawn))
    return ChainShape(
        parents=np.where(depths > 0, number - 1, -1),
        depths=depths,
        offsets=offsets,
        first_child=np.concatenate([[0], np.cumsum(inner)]),
        links=np.flatnonzero(inner) + 1,
        row_of=row_of,
        place=place,
        levels=_levels(np.array(lengths)),
        owners=owners[drawn],
        numbers=depths[drawn],
    )


def _levels(lengths: Int[np.ndarray, " requests"]) -> list[ChainLevel]:
    before, levels = np.arange(len(lengths)), list[ChainLevel]()
    for depth in range(int(lengths.max(initial=0))):
        owners = np.flatnonzero(lengths > depth)
        above = None if levels and len(owners) == len(before) else np.searchsorted(before, owners)
        levels.append(ChainLevel(owners=owners.tolist(), above=above))
        before = owners
    return levels
