"""The batch of one forward over several slots: rows, padding, and packing of the results. For models and heads."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.lm.protocol import Segment


def padded_width(count: int) -> int:
    """Columns of a forward over `count` nodes: the count itself up to 16, then the next of eight sizes per doubling.

    Kernel libraries cache prepared work for every new shape; few shapes keep that cache small.

    Example:
        >>> [padded_width(n) for n in (5, 16, 17, 33, 100, 512)]
        [5, 16, 18, 36, 104, 512]
    """
    step = 1 if count <= 16 else 1 << ((count - 1).bit_length() - 4)
    return -(-count // step) * step


def upload(arrays: Sequence[Int[np.ndarray, "..."]], device: torch.device) -> list[Int[Tensor, "..."]]:
    """Integer arrays on the device, in one transfer."""
    if len(arrays) == 1:
        return [torch.from_numpy(np.array(arrays[0], dtype=np.int64)).to(device, non_blocking=True)]
    packed = np.concatenate([a.ravel() for a in arrays]).astype(np.int64, copy=False)
    parts = torch.from_numpy(packed).to(device, non_blocking=True).split([a.size for a in arrays])
    return [part.view(a.shape) for part, a in zip(parts, arrays, strict=True)]


def joined(parts: Sequence[Float[Tensor, "_ dim"]], nothing: Float[Tensor, "none dim"]) -> Float[Tensor, "all dim"]:
    """The tensors concatenated; `nothing` if there are none."""
    if not parts:
        return nothing
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


@dataclass(frozen=True, kw_only=True)
class ForwardBatch:
    """The padded shape of one forward; rows are sorted by where their slots lie in the cache.

    Column c of a row with n new nodes stands for its node `min(c, n - 1)`: padding repeats the last node.

    Attributes:
        segments: One per row.
        order: For each segment as the caller gave them, its row.
        counts: New nodes per row.
        width: Columns.
    """

    segments: Sequence[Segment]
    order: Sequence[int]
    counts: Int[np.ndarray, " rows"]
    width: int

    @classmethod
    def of(cls, segments: Sequence[Segment], row: Callable[[int], int], width: Callable[[int], int]) -> "ForwardBatch":
        """The batch of some segments, each with at least one node.

        Args:
            row: The cache row of a slot.
            width: The number of columns of a forward over this many nodes.
        """
        if len(segments) == 1:
            count = segments[0].tokens.shape[0]
            return cls(segments=segments, order=(0,), counts=np.array([count]), width=width(count))
        by_row = sorted(range(len(segments)), key=lambda i: row(segments[i].slot))
        order = [0] * len(segments)
        for place, i in enumerate(by_row):
            order[i] = place
        counts = np.array([segments[i].tokens.shape[0] for i in by_row], dtype=np.int64)
        sorted_ = [segments[i] for i in by_row]
        return cls(segments=sorted_, order=order, counts=counts, width=width(int(counts.max(initial=1))))

    @property
    def slots(self) -> list[int]:
        """The slot of each row."""
        return [s.slot for s in self.segments]

    @property
    def fills_one_row(self) -> bool:
        """Whether there is a single row without padding."""
        return len(self.segments) == 1 and int(self.counts[0]) == self.width

    @property
    def prefill_only(self) -> bool:
        """Whether no logits are wanted."""
        return all(s.num_wanted == 0 for s in self.segments)

    def wanted(self) -> list[Int[np.ndarray, " _"]]:
        """The columns whose logits each row wants."""
        return [np.array(s.wanted, dtype=np.int64) for s in self.segments]

    def columns(self, at_least: int) -> Int[np.ndarray, " columns"]:
        """The columns for which the output layer runs: those that any row wants, and a few more up to `at_least`."""
        wanted = self.wanted()
        if len(wanted) == 1 and len(wanted[0]) >= at_least:
            return wanted[0]
        marked = np.zeros(self.width, dtype=bool)
        for columns in wanted:
            marked[columns] = True
        if 0 < (count := int(marked.sum())) < at_least:
            marked[np.flatnonzero(~marked)[: at_least - count]] = True
        return np.flatnonzero(marked)

    def tokens(self, device: torch.device) -> Int[Tensor, "rows width"]:
        """The tokens of all rows, padded."""
        if self.fills_one_row:
            return self.segments[0].tokens.to(device, torch.long, non_blocking=True)[None]
        tokens = torch.cat([s.tokens.to(device, torch.long, non_blocking=True) for s in self.segments])
        return self._padded(tokens, device)

    @property
    def has_features(self) -> bool:
        """Whether the segments have features."""
        return any(s.features is not None for s in self.segments)

    def features(self, device: torch.device, dtype: torch.dtype) -> Float[Tensor, "rows width dim"] | None:
        """The features of all rows, padded; None if the segments have none.

        Raises:
            ValueError: Some segments have features and some have none.
        """
        parts = [s.features for s in self.segments if s.features is not None]
        if not parts:
            return None
        if len(parts) < len(self.segments):
            raise ValueError("some segments of one forward have features and some have none")
        return self._padded(joined([f.to(device, dtype, non_blocking=True) for f in parts], parts[0]), device)

    def all_nodes(self, values: Float[Tensor, "rows width dim"]) -> Float[Tensor, "nodes dim"]:
        """Values of all new nodes, packed in the caller's order of segments."""
        nodes = [np.arange(n) for n in self.counts.tolist()]
        return self.packed(values, np.arange(self.width), nodes)

    def packed(
        self,
        values: Float[Tensor, "rows columns dim"],
        columns: Int[np.ndarray, " columns"],
        wanted: Sequence[Int[np.ndarray, " _"]],
    ) -> Float[Tensor, "wanted dim"]:
        """The wanted columns of each row, packed in the caller's order of segments.

        Args:
            columns: Which columns the values are of.
            wanted: The columns that each row wants.
        """
        if len(wanted) == 1 and len(wanted[0]) == len(columns):
            return values[0]
        places = [row * len(columns) + np.searchsorted(columns, wanted[row]) for row in self.order]
        index = np.concatenate(places)
        flat = values.flatten(0, 1)
        if len(index) == 0 or (index[-1] - index[0] == len(index) - 1 and (np.diff(index) == 1).all()):
            first = int(index[0]) if len(index) else 0
            return flat[first : first + len(index)]
        return flat.index_select(0, upload([index], values.device)[0])

    def packed_taps(self, taps: Mapping[int, Float[Tensor, "rows width dim"]]) -> dict[int, Float[Tensor, "nodes dim"]]:
        """Hidden states of all new nodes, for each tap."""
        return {k: self.all_nodes(values) for k, values in taps.items()}

    def _padded(self, values: Tensor, device: torch.device) -> Tensor:
        """Packed values of all rows as `[rows, width, ...]`."""
        if (self.counts == self.width).all():
            return values.view(len(self.segments), self.width, *values.shape[1:])
        first = np.cumsum(self.counts) - self.counts
        source = first[:, None] + np.minimum(np.arange(self.width), self.counts[:, None] - 1)
        return values[upload([source], device)[0]]


@dataclass(frozen=True, kw_only=True)
class Padded:
    """The batch of a forward whose nodes are padded already.

    Attributes:
        ids: The tokens of all rows.
        vectors: The features of all rows; None if they have none.
    """

    ids: Int[Tensor, "rows width"]
    vectors: Float[Tensor, "rows width dim"] | None

    @classmethod
    def one_each(cls, nodes: Int[Tensor, " rows"], vectors: Float[Tensor, "rows dim"] | None, width: int) -> "Padded":
        """One new node per row. Padding repeats the node."""
        ids, vectors = nodes[:, None], None if vectors is None else vectors[:, None]
        if width > 1:
            ids, vectors = ids.repeat(1, width), None if vectors is None else vectors.repeat(1, width, 1)
        return cls(ids=ids, vectors=vectors)

    @property
    def width(self) -> int:
        """Columns."""
        return self.ids.shape[1]

    def tokens(self, device: torch.device) -> Int[Tensor, "rows width"]:
        """The tokens of all rows."""
        return self.ids.to(device, torch.long, non_blocking=True)

    @property
    def has_features(self) -> bool:
        """Whether the nodes have features."""
        return self.vectors is not None

    def features(self, device: torch.device, dtype: torch.dtype) -> Float[Tensor, "rows width dim"] | None:
        """The features of all rows."""
        return None if self.vectors is None else self.vectors.to(device, dtype, non_blocking=True)
