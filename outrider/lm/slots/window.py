"""The part of a slot cache that one forward reads and extends, as transformers sees it.

Relied on in transformers (read in 5.17 - 5.23, run in 5.23): with an explicit 4-D mask and `position_ids`, a causal LM
calls `cache.update(keys, values, layer_idx) -> (keys, values)` once per layer that owns a cache, sometimes
`cache.get_seq_length()`, whose result it then does not use, and nothing else; the cache need not inherit from `Cache`.
HRM-Text asks `is_initialized`, which matters to prompts with token types, and Mllama looks in `layers` for what images
left there.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Window:
    """Writes the new keys and values of a forward, and shows it all of them.

    Attributes:
        entries: For each layer that keeps keys and values, the indices of their tensors in `storages`.
        storages: Per layer its keys and its values, `[rows, capacity, heads, dim]`.
        places: Where the new ones go: positions in the storages, row after row.
        view: How many positions the forward reads.
        select: The rows that it reads; None: all.
    """

    is_initialized = True
    layers = ()

    def __init__(
        self,
        entries: Mapping[int, tuple[int, int]],
        storages: Sequence[Float[Tensor, "_ _ _ _"]],
        places: Int[Tensor, " places"],
        view: int,
        select: Int[Tensor, " rows"] | None = None,
    ) -> None:
        self.entries, self.storages, self.places, self.view, self.select = entries, storages, places, view, select

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Called by transformers: write the new keys and values of a layer, return all of them."""
        key_entry, value_entry = self.entries[layer_idx]
        return self._write(self.storages[key_entry], keys), self._write(self.storages[value_entry], values)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Called by transformers; lengths differ by slot, and with explicit positions the answer is not used."""
        return 0

    def _write(
        self, storage: Float[Tensor, "rows capacity heads dim"], states: Float[Tensor, "batch heads width dim"]
    ) -> Float[Tensor, "batch heads view dim"]:
        batch, heads, width, dim = states.shape
        flat = states.transpose(1, 2).reshape(batch * width, heads, dim)
        storage.view(-1, heads, dim).index_copy_(0, self.places, flat)
        rows = storage[:, : self.view]
        return (rows if self.select is None else rows.index_select(0, self.select)).transpose(1, 2)


class SpreadWindow(Window):
    """The same where layers are on several devices. Places and rows go to each device once in a forward.

    Its arguments are those of `Window`, with places and rows on any device.
    """

    def __init__(
        self,
        entries: Mapping[int, tuple[int, int]],
        storages: Sequence[Float[Tensor, "_ _ _ _"]],
        places: Int[Tensor, " places"],
        view: int,
        select: Int[Tensor, " rows"] | None = None,
    ) -> None:
        super().__init__(entries, storages, places, view, select)
        self._on: dict[torch.device, Window] = {}

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        device = self.storages[self.entries[layer_idx][0]].device
        if device not in self._on:
            select = None if self.select is None else self.select.to(device, non_blocking=True)
            places = self.places.to(device, non_blocking=True)
            self._on[device] = Window(self.entries, self.storages, places, self.view, select)
        return self._on[device].update(keys, values, layer_idx)
