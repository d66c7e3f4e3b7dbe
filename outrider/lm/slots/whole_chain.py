"""Chains that are drawn in one go: the inputs of all their forwards."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from outrider.lm.slots.batch import upload
from outrider.lm.slots.chain import ChainNoise, DrawnTokens, Links
from outrider.lm.slots.masks import MaskBuilder
from outrider.lm.slots.slots import Slots


@dataclass(frozen=True, kw_only=True)
class WholeChain:
    """The inputs of a chain that is drawn in one go. Its rows are the first ones of the cache.

    Attributes:
        positions: Per forward, the position of each column's node.
        places: Where they go, counted from the begin of the cache.
        masks: Which keys each column sees, all forwards one after another.
        view: How many keys they read.
        rows: For each of the caller's slots, its row.
        features: The vector that each slot's first token is read with; None where tokens are read alone.
    """

    positions: Int[Tensor, "steps rows width"]
    places: Int[Tensor, "steps rows width"]
    masks: object
    view: int
    rows: Sequence[int]
    features: Float[Tensor, "n dim"] | None

    @classmethod
    def of(
        cls,
        names: Sequence[int],
        counts: Sequence[int],
        features: Float[Tensor, "n dim"] | None,
        slots: Slots,
        builder: MaskBuilder,
        *,
        width: int,
    ) -> "WholeChain":
        """The inputs of a chain behind some slots, in one transfer. Rows whose chain has ended, and the rows of other
        slots, write to the place that belongs to no slot.

        Args:
            names: The numbers of the slots.
            counts: How many nodes each of them gets.
            width: Columns of each forward.
        """
        cache, steps, used = slots.cache, max(counts), [slots[slot].used for slot in names]
        ends = [n + count for n, count in zip(used, counts, strict=True)]
        nodes = cache.places(names, ends, np.array(counts), steps)
        rows = [cache.row(slot) for slot in names]
        num_rows = cache.bucket(rows)
        places = np.broadcast_to(cache.padding(num_rows)[:, None], (steps, num_rows, width)).copy()
        places[:, rows, 0] = nodes.T
        positions = np.zeros((steps, num_rows, width), dtype=np.int64)
        # No position lies behind the end of its chain: the model may have none.
        last = np.maximum(np.array(ends) - 1, 0)
        positions[:, rows] = np.minimum(np.array(used) + np.arange(steps)[:, None], last)[:, :, None]
        written, where = upload([places, positions], builder.device)
        view = cache.view(max(ends), doubling=True)
        masks = builder.masks(None, where.flatten(0, 1), view)
        return cls(positions=where, places=written, masks=masks, view=view, rows=rows, features=features)


@runtime_checkable
class Replaying(Protocol):
    """Records forwards and chains of forwards, and replays them.

    Attributes:
        works: Whether it can; False once something could not be recorded.
    """

    @property
    def works(self) -> bool: ...

    def draw_chain(
        self, chain: WholeChain, tokens: Int[Tensor, " n"], links: Links, noise: ChainNoise | None
    ) -> DrawnTokens | None:
        """Run all forwards and draws of a chain; None where they cannot be recorded."""
        ...
