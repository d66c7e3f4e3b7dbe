"""Which rows of a batch get a forward of their own, so that short rows need not read as many keys as long ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from outrider.lm.protocol import Extension, Segment
from outrider.lm.slots.buckets import bucket_rows
from outrider.lm.slots.cache import SlotCache

LAUNCH = {"cpu": 4 << 20, "eager": 2 << 30, "replayed": 400 << 20}
"""Bytes that are read in the time that the operations of one layer cost besides what they read. Estimates: 0.2 ms on a
CPU that reads 20 GB/s; on a GPU that reads 4 TB/s, 0.5 ms launched one by one, and 0.1 ms replayed.
"""


@dataclass(frozen=True, kw_only=True)
class ForwardPrice:
    """What one more forward costs, whatever keys it reads.

    Attributes:
        weights: Bytes of the weights, which it reads once more.
        num_layers: Layers, whose operations are launched once more.
        position: Bytes of the keys and values of one position, all layers together.
        device: Where it runs.
    """

    weights: int
    num_layers: int
    position: int
    device: torch.device

    @cached_property
    def least(self) -> float:
        """The fewest keys that are read in the time that it takes, however it is launched."""
        return self.keys(replayed=True)

    def keys(self, *, replayed: bool) -> float:
        """How many keys are read in the time that it takes."""
        launch = LAUNCH["cpu" if self.device.type == "cpu" else "replayed" if replayed else "eager"]
        return (self.weights + self.num_layers * launch) / self.position

    def apart(self, used: Sequence[int], cache: SlotCache, *, replayed: bool) -> Sequence[int]:
        """Which rows get a forward of their own, because their slots are much longer than the others; often none.

        Args:
            used: Tokens and nodes of each row's slot.
            replayed: Whether the forwards are replayed.
        """
        longest = sorted(range(len(used)), key=lambda i: -used[i])
        views = [cache.view(used[i], doubling=replayed) for i in longest]
        return sorted(longest[: rows_apart(views, self.keys(replayed=replayed), replayed=replayed)])


def rows_apart(views: Sequence[int], price: float, *, replayed: bool = False) -> int:
    r"""How many of the longest rows get a forward of their own; 0 where that does not pay.

    One forward over $n$ rows reads $n v_0$ keys, because every row reads as many as the longest. With the first $k$
    rows apart, $k v_0 + (n - k) v_k$ are read.

    Args:
        views: How many keys each row reads in a forward of its own, the longest first.
        price: How many keys are read in the time that a second forward costs.
        replayed: Whether forwards are replayed. The first one then reads a power of two of rows, and the second one all
            rows: the long ones stand in front and are idle.

    Example:
        >>> views = [32768, *[1024] * 31]
        >>> rows_apart(views, price=10**5), rows_apart(views, price=10**6), rows_apart(views[1:], price=10**5)
        (1, 0, 0)
    """
    count = len(views)
    if count < 2:
        return 0
    together = (bucket_rows(count) if replayed else count) * views[0]

    def read(apart: int) -> int:
        if replayed:
            return bucket_rows(apart) * views[0] + bucket_rows(count) * views[apart]
        return apart * views[0] + (count - apart) * views[apart]

    best = min(range(1, count), key=read)
    return best if together - read(best) > price else 0


def in_order(extensions: Sequence[Extension], parts: Sequence[Sequence[int]], segments: Sequence[Segment]) -> Extension:
    """The results of several forwards as if they were of one.

    Args:
        extensions: The results of each forward.
        parts: Which of the segments were in each forward.
        segments: All segments.
    """
    wanted = [[segments[i].num_wanted for i in part] for part in parts]
    counts = [[segments[i].tokens.shape[0] for i in part] for part in parts]

    def packed(values: Sequence[torch.Tensor], sizes: Sequence[list[int]]) -> torch.Tensor:
        pieces = [piece for each, split_sizes in zip(values, sizes, strict=True) for piece in each.split(split_sizes)]
        places = [i for part in parts for i in part]
        return torch.cat([piece for _, piece in sorted(zip(places, pieces, strict=True), key=lambda pair: pair[0])])

    features = [each.features for each in extensions if each.features is not None]
    return Extension(
        logits=packed([each.logits for each in extensions], wanted),
        taps={k: packed([each.taps[k] for each in extensions], counts) for k in extensions[0].taps},
        features=packed(features, counts) if features else None,
    )
