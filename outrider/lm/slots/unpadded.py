"""Forwards without padding: one row that holds the nodes of all slots, one slot after another."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from outrider.lm.protocol import Extension
from outrider.lm.slots.batch import ForwardBatch, Padded, upload
from outrider.lm.slots.inputs import Inputs, Outputs, PreparedForward
from outrider.lm.slots.layout import Layout, NodeOrder
from outrider.lm.slots.masks import MaskBuilder, look
from outrider.lm.slots.slots import Pending, Slots


@dataclass(frozen=True, kw_only=True)
class UnpaddedForward(PreparedForward):
    """A forward without padding. Its nodes stand in the caller's order of segments.

    Attributes:
        num_nodes: Nodes of all slots.
        num_wanted: Nodes whose logits are wanted.
    """

    num_nodes: int
    num_wanted: int

    @classmethod
    def of(
        cls,
        batch: ForwardBatch,
        grown: Mapping[int, Pending],
        slots: Slots,
        builder: MaskBuilder,
        *,
        pad_to: int,
        width: int,
    ) -> "UnpaddedForward":
        """The forward over a batch.

        Args:
            grown: What will be pending in each slot.
            pad_to: Logits are computed for at least this many nodes.
            width: Nodes of the forward. Those that no slot has repeat the last one.
        """
        names, cache, device = batch.slots, slots.cache, builder.device
        used = [slots[s].length + len(grown[s]) for s in names]
        lengths, pendings = [slots[s].length for s in names], [grown[s] for s in names]
        sight = look(lengths, pendings, batch.counts, batch.width, [s.sees for s in batch.segments])
        written = cache.places(names, used, batch.counts, batch.width)
        order = NodeOrder.of(batch.counts, batch.order, batch.width)
        count = len(order.places)
        more = np.full(width - count, order.places[-1])
        places = np.concatenate([order.places, more])
        where = written.ravel()[places]
        where[count:] = cache.row(names[0]) * cache.capacity + cache.capacity - 1
        by_caller = [batch.segments[row] for row in batch.order]
        tokens = torch.cat([segment.tokens.to(device, torch.long) for segment in by_caller])
        columns = np.concatenate(
            [start + np.array(s.wanted, dtype=np.int64) for start, s in zip(order.first, by_caller, strict=True)]
        )
        positions = sight.positions
        seen_from, nodes, at, where_at, node_positions = upload(
            [positions, order.nodes, places, where, positions.ravel()[places]], device
        )
        view = cache.view(max(used))
        inputs = Inputs(
            batch=Padded(ids=torch.cat([tokens, tokens[-1:].expand(len(more))])[None], vectors=None),
            positions=node_positions[None],
            masks=builder.masks(sight, seen_from, view),
            window=cache.window(names, where_at, view),
            columns=np.concatenate([columns, np.zeros(max(0, pad_to - len(columns)), dtype=np.int64)]),
            layout=Layout(nodes=nodes, places=at),
        )
        return cls(num_nodes=count, num_wanted=len(columns), inputs=inputs)

    def extension(self, outputs: Outputs, vocab_size: int) -> Extension:
        return Extension(
            logits=outputs.logits[0, : self.num_wanted, :vocab_size],
            taps={tap: states[0, : self.num_nodes] for tap, states in outputs.taps.items()},
        )
