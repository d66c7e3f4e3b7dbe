"""Drafts made by hand, for tests."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from outrider.core.types import Draft


def chains(tokens: Sequence[Sequence[int]], rows: Float[Tensor, "drawn vocab"] | None, anchor: int = 0) -> Draft:
    """One chain per request; drawn from `rows`, which lie packed, or chosen."""
    lengths = np.array([len(t) for t in tokens])
    offsets = np.concatenate([[0], np.cumsum(lengths + 1)])
    nodes = int(offsets[-1])
    parents = np.arange(nodes) - 1
    parents[offsets[:-1]] = -1
    children = np.flatnonzero(parents >= 0)
    counts = np.bincount(parents[children], minlength=nodes)
    row_of = np.full(nodes, -1)
    if rows is not None:
        row_of[counts > 0] = np.arange(int(counts.sum()))
    return Draft(
        tokens=torch.tensor([t for chain in tokens for t in (anchor, *chain)]),
        parents=parents,
        depths=np.arange(nodes) - np.repeat(offsets[:-1], lengths + 1),
        numbers=np.arange(nodes) - np.repeat(offsets[:-1], lengths + 1),
        offsets=offsets,
        first_child=np.concatenate([[0], np.cumsum(counts)]),
        links=children,
        rows=rows,
        row_of=row_of,
        structure="chain",
    )
