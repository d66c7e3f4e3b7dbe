"""Chains that are drawn forward by forward: the inputs of the forwards over the same slots, made at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from outrider.lm.protocol import Extension
from outrider.lm.slots.batch import Padded, upload
from outrider.lm.slots.cache import SlotCache
from outrider.lm.slots.inputs import Inputs, Outputs, PreparedForward
from outrider.lm.slots.masks import MaskBuilder
from outrider.lm.slots.slots import Slots


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Forwards of a chain over the same slots. Per forward: where it writes, its positions, how many keys it reads and
    which of them it sees.

    Attributes:
        cache: Where keys and values lie.
        slots: One per row.
        rows: Their rows of the cache, where the forwards may be replayed.
        columns: The columns of each forward; the nodes are in the first.
        order: For each row, which of the caller's slots lies there; None where rows are in the caller's order.
        back: For each of the caller's slots, its row; None as above.
    """

    cache: SlotCache
    slots: Sequence[int]
    rows: Sequence[int]
    places: Sequence[Int[Tensor, "rows width"]]
    positions: Sequence[Int[Tensor, "rows width"]]
    views: Sequence[int]
    masks: Sequence[object]
    columns: Int[np.ndarray, " width"]
    order: Int[Tensor, " rows"] | None
    back: Int[Tensor, " rows"] | None

    @classmethod
    def of(
        cls, names: Sequence[int], steps: int, slots: Slots, builder: MaskBuilder, *, width: int, replayed: bool
    ) -> "Stretch":
        """The next `steps` forwards over the same slots, whose rows lie together; one transfer to the device.

        Args:
            names: The numbers of the slots.
            width: Columns of each forward.
            replayed: Whether the forwards may be replayed.
        """
        cache = slots.cache
        order = sorted(range(len(names)), key=lambda i: cache.row(names[i]))
        by_row = [names[i] for i in order]
        used = [slots[slot].used for slot in by_row]
        orders: list[Int[Tensor, " rows"]] = []
        if len(names) == width == 1:
            run = builder.keys(used[0] + steps)[used[0] :][:, None]
            written, positions = cache.run(names[0], used[0] + steps, run)[:, None], run[:, None]
        else:
            # One column per forward; padding is written to the place of the column behind them.
            places = cache.places(by_row, [n + steps for n in used], np.full(len(names), steps), steps + 1)
            number = np.arange(steps)[:, None]
            column = np.where(np.arange(width) == 0, number, steps)
            moved = order != list(range(len(order)))
            arrays = [
                np.ascontiguousarray(places[:, column].swapaxes(0, 1)),
                np.broadcast_to((np.array(used) + number)[:, :, None], (steps, len(names), width)),
                *([np.array(order), np.argsort(order)] if moved else []),
            ]
            written, positions, *orders = upload(arrays, builder.device)
        views = [cache.view(max(used) + k, doubling=replayed) for k in range(1, steps + 1)]
        return cls(
            cache=cache,
            slots=by_row,
            rows=[cache.row(slot) for slot in by_row] if replayed else (),
            places=written.unbind(0),
            positions=positions.unbind(0),
            views=views,
            masks=builder.chained(positions, views),
            columns=np.arange(width),
            order=orders[0] if orders else None,
            back=orders[1] if orders else None,
        )

    def forward(self, step: int, tokens: Int[Tensor, " n"], features: Float[Tensor, "n dim"] | None) -> "StretchStep":
        """One of the forwards.

        Args:
            step: Its number.
            tokens: One token for each of the caller's slots.
            features: The vector that a head reads with each token.
        """
        if self.order is not None:
            tokens = tokens.to(self.order.device, non_blocking=True)[self.order]
            features = None if features is None else features[self.order]
        inputs = Inputs(
            batch=Padded.one_each(tokens, features, len(self.columns)),
            positions=self.positions[step],
            masks=self.masks[step],
            window=self.cache.window(self.slots, self.places[step], self.views[step]),
            columns=self.columns,
            rows=self.rows,
            places=self.places[step] if self.rows else None,
        )
        return StretchStep(inputs=inputs, back=self.back)


@dataclass(frozen=True, kw_only=True)
class StretchStep(PreparedForward):
    """One forward of a chain. `back` is that of the stretch."""

    back: Int[Tensor, " rows"] | None

    def extension(self, outputs: Outputs, vocab_size: int) -> Extension:
        back, logits, vectors = self.back, outputs.logits[:, 0, :vocab_size], outputs.features
        if vectors is not None:
            vectors = vectors[:, 0] if back is None else vectors[back, 0]
        return Extension(logits=logits if back is None else logits[back], taps={}, features=vectors)
