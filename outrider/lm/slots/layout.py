"""Where the nodes of a forward without padding stand in the rows that attention reads."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The nodes of a forward, one after another, and the padded rows in which attention reads them. All else that a
    model computes, it computes for the nodes alone.

    Attributes:
        nodes: The node at each place of the rows. Padding repeats the last node of its row.
        places: The place of each node, counted row after row.

    Example:
        >>> import torch
        >>> layout = Layout(nodes=torch.tensor([[0, 1], [2, 2]]), places=torch.tensor([0, 1, 2]))
        >>> layout.rows(torch.tensor([[[[5.0], [6.0], [7.0]]]]))[:, 0, :, 0]
        tensor([[5., 6.],
                [7., 7.]])
    """

    nodes: Int[Tensor, "rows width"]
    places: Int[Tensor, " nodes"]

    @classmethod
    def full(cls, numbers: Int[Tensor, " numbers"], rows: int, width: int) -> "Layout":
        """The layout of rows without padding.

        Args:
            numbers: The numbers from 0 on.
        """
        return cls(nodes=numbers.view(rows, width), places=numbers)

    def rows(self, states: Float[Tensor, "1 heads nodes dim"]) -> Float[Tensor, "rows heads width dim"]:
        """What belongs to nodes, in the rows of attention."""
        rows, width = self.nodes.shape
        spread = states[0].index_select(1, self.nodes.reshape(-1))
        return spread.unflatten(1, (rows, width)).transpose(0, 1)

    def back(self, states: Float[Tensor, "rows width heads dim"]) -> Float[Tensor, "1 nodes heads dim"]:
        """What belongs to the rows of attention, for each node."""
        return states.flatten(0, 1).index_select(0, self.places)[None]


@dataclass(frozen=True, kw_only=True)
class NodeOrder:
    """The nodes of several rows, one after another in an order of rows that a caller chose, on the host.

    Attributes:
        nodes: The node at each place of the rows.
        places: The place of each node, counted row after row.
        first: For each row as the caller orders them, its first node.
    """

    nodes: Int[np.ndarray, "rows width"]
    places: Int[np.ndarray, " nodes"]
    first: Int[np.ndarray, " rows"]

    @classmethod
    def of(cls, counts: Int[np.ndarray, " rows"], rows: Sequence[int], width: int) -> "NodeOrder":
        """The order of some nodes.

        Args:
            counts: Nodes of each row.
            rows: The rows in the order of their nodes.
            width: Places of each row.

        Example:
            >>> NodeOrder.of(np.array([2, 1]), rows=(1, 0), width=2).nodes.tolist()
            [[1, 2], [0, 0]]
        """
        order = np.asarray(rows)
        row_counts = counts[order]
        first = np.cumsum(row_counts) - row_counts
        begin = np.empty_like(first)
        begin[order] = first
        nodes = begin[:, None] + np.minimum(np.arange(width), counts[:, None] - 1)
        places = np.repeat(order * width - first, row_counts) + np.arange(int(row_counts.sum()))
        return cls(nodes=nodes, places=places, first=first)
