"""Keys and values of many slots in few tensors."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.core.types import InputError
from outrider.host import large_pages
from outrider.lm.slots.buckets import bucket_rows
from outrider.lm.slots.window import SpreadWindow, Window

_STEP = 64
FIRST = 256
"""Places of each row at first."""
SHARE = 0.8
"""How much of the free memory caches may take."""
_ENDLESS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class StateShape:
    """Keys or values of one layer at one position."""

    heads: int
    dim: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.heads * self.dim * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What one layer keeps per position; the sizes of keys and values may differ.

    Attributes:
        device: Where the layer is; None: where the cache is.
    """

    keys: StateShape
    values: StateShape
    device: torch.device | None = None

    @property
    def num_bytes(self) -> int:
        return self.keys.num_bytes + self.values.num_bytes


class Probe:
    """A cache that records only the shapes of keys and values.

    Attributes:
        layers: What each layer keeps, and where, by its index. Layers that share another's keys and values are not
            there.
    """

    is_initialized = True

    def __init__(self) -> None:
        self.layers: dict[int, Layer] = {}

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        shapes = [StateShape(heads=s.shape[1], dim=s.shape[3], dtype=s.dtype) for s in (keys, values)]
        self.layers[layer_idx] = Layer(keys=shapes[0], values=shapes[1], device=keys.device)
        return keys, values

    def values(self) -> list[list[Any]]:
        """What was recorded, as values of JSON."""
        return [
            [
                index,
                *([each.heads, each.dim, str(each.dtype)] for each in (layer.keys, layer.values)),
                str(layer.device),
            ]
            for index, layer in self.layers.items()
        ]

    @classmethod
    def of_values(cls, values: Sequence[Sequence[Any]]) -> "Probe":
        """What `values` returned."""
        probe = cls()
        for index, *both, device in values:
            shapes = [StateShape(heads=each[0], dim=each[1], dtype=getattr(torch, each[2][6:])) for each in both]
            probe.layers[index] = Layer(keys=shapes[0], values=shapes[1], device=torch.device(device))
        return probe

    @property
    def devices(self) -> set[torch.device]:
        """Where keys and values were."""
        return {layer.device for layer in self.layers.values() if layer.device is not None}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def _round_up(count: int) -> int:
    return -(-count // _STEP) * _STEP


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a device in bytes; None if unknown."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if device.type != "cpu":
        return None
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def worst_bytes(layers: Mapping[int, Layer], max_slots: int, max_context: int) -> int:
    """Most memory that the slots can need: all slots full, plus half as much while storage grows."""
    position = sum(layer.num_bytes for layer in layers.values())
    return position * max_slots * _round_up(max_context + 1) * 3 // 2


def fitting_context(
    layers: Mapping[int, Layer], *, max_slots: int, max_context: int | None, limit: int | None, free: int | None
) -> int:
    """Tokens per slot: `max_context` if it fits in free memory, without it as many as `limit` and memory allow.

    Args:
        limit: The most that the model allows; None where it has no end, and a million is taken.
        free: Bytes; None where it is not known.

    Raises:
        InputError: It does not fit.
    """
    asked = max_context or limit or _ENDLESS
    need = worst_bytes(layers, max_slots, asked)
    if free is None or need <= free * SHARE:
        return asked
    if max_context is None:
        per_position = worst_bytes(layers, max_slots, _STEP - 1) / _STEP
        fits = int(free * SHARE / per_position) // _STEP * _STEP - 1
        if fits > 0:
            return fits
    raise InputError(
        f"the cache of {max_slots} slots of {asked} tokens can come to need {need / 1e9:.2f} GB, and of "
        f"{free / 1e9:.2f} GB free memory {SHARE:.0%} may be used; lower max_slots or max_context, or max_warm_slots "
        "if you gave it"
    )


class SlotCache:
    """Slots of different lengths that one forward reads and extends together.

    A slot lies in a row. The rows in use are always the first ones: releasing a slot moves the last row into the hole.
    So a forward over all slots reads one contiguous view and copies nothing. The last place of each row belongs to no
    slot; padding is written there. Storage begins with few rows and doubles when it must; for a long prompt it gets
    what that needs, and an eighth. Where such storage would pass `most_bytes`, it gets as many rows as are in use, each
    as long as memory allows. Changes in place.

    Attributes:
        num_bytes: Memory held.
        bytes_moved: Bytes copied so far to compact accepted paths and to fill holes.
        generation: How often storage was allocated. As long as it stays, all storages stay where they are.
        num_rows: Rows of the storages.
        capacity: Places of each row.
        position_bytes: Bytes of one position of one slot.

    Args:
        layers: What each layer keeps. Keys and values lie where their layer is.
        max_slots: Most slots at once.
        max_context: Most tokens and nodes of one slot.
        device: Where the places are counted, and where layers are that do not say otherwise.
        num_rows: Rows at first, and at least.
        most_bytes: Most memory of the storages; None: as much as all slots can come to need.
    """

    def __init__(
        self,
        layers: Mapping[int, Layer],
        *,
        max_slots: int,
        max_context: int,
        device: torch.device,
        num_rows: int = 1,
        most_bytes: int | None = None,
    ) -> None:
        self.bytes_moved = 0
        self._max_slots = max_slots
        self._max_capacity = _round_up(max_context + 1)
        self._device = device
        self._shapes: list[StateShape] = []
        self._devices: list[torch.device] = []
        self._entries: dict[int, tuple[int, int]] = {}
        for index, layer in sorted(layers.items()):
            self._entries[index] = (len(self._shapes), len(self._shapes) + 1)
            self._shapes += [layer.keys, layer.values]
            self._devices += 2 * [layer.device or device]
        self._window = Window if set(self._devices) <= {device} else SpreadWindow
        self.position_bytes = sum(shape.num_bytes for shape in self._shapes)
        self._least_rows, self._most_bytes = num_rows, most_bytes
        self._row_of: dict[int, int] = {}
        self._used: dict[int, int] = {}
        self._parts: dict[tuple[int, int], Sequence[Tensor]] = {}
        self.num_rows, self.capacity, self.generation = num_rows, min(FIRST, self._max_capacity), 1
        # A compiler that writes into a part of a tensor copies all of it, so each layer's keys are one, and its values.
        self._storages = [self._allocated(*each) for each in zip(self._shapes, self._devices, strict=True)]

    def _allocated(self, shape: StateShape, device: torch.device) -> Float[Tensor, "rows capacity heads dim"]:
        size = (self.num_rows, self.capacity, shape.heads, shape.dim)
        with torch.inference_mode(False):
            # Zeros, because even a masked key reaches the output if it is not finite.
            if device.type == "cpu":
                return large_pages.zeros(size, shape.dtype)
            return torch.zeros(size, dtype=shape.dtype, device=device)

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self._storages)

    def bytes_on(self, device: torch.device) -> int:
        """Memory held on one device."""
        return sum(each.nbytes for each, place in zip(self._storages, self._devices, strict=True) if place == device)

    @property
    def storages(self) -> Sequence[Float[Tensor, "_ _ _ _"]]:
        """The tensors that hold everything: per layer its keys and its values, `[rows, capacity, heads, dim]`."""
        return self._storages

    @property
    def entries(self) -> Mapping[int, tuple[int, int]]:
        """For each layer that keeps keys and values, the indices of their tensors in `storages`."""
        return self._entries

    def row(self, slot: int) -> int:
        """The row in which a slot lies now."""
        return self._row_of[slot]

    def open(self, slot: int) -> None:
        """Give a slot the next row."""
        self._row_of[slot] = len(self._row_of)
        self._used[slot] = 0

    def close(self, slot: int, *, clean: bool = False) -> None:
        """Take a slot's row back and move the last row into the hole.

        Args:
            clean: Whether the row is overwritten first: what is not a number would reach whoever gets it next, even
                behind a mask.
        """
        hole = self._row_of.pop(slot)
        for storage in self._storages if clean and hole < self.num_rows else ():
            storage[hole].zero_()
        self._used.pop(slot)
        last = len(self._row_of)
        if hole == last:
            return
        moved = next(s for s, row in self._row_of.items() if row == last)
        self._copy(last, hole, self._used[moved])
        self._row_of[moved] = hole

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first positions of one slot to another, which is open and empty."""
        self._reserve(length)
        self._used[target] = length
        self._copy(self._row_of[source], self._row_of[target], length)

    def gather(self, slots: Sequence[int]) -> None:
        """Move rows so that these slots are neighbours and the next forwards over them read one view.

        Slots of ended requests that are kept may lie between those that run.
        """
        rows = sorted(self._row_of[slot] for slot in slots)
        if rows[-1] - rows[0] >= len(rows):
            starts = range(rows[-1] - len(rows) + 2)
            self._move_into(rows, max(starts, key=lambda w: sum(w <= row < w + len(rows) for row in rows)))

    def gather_in_front(self, slots: Sequence[int]) -> None:
        """Move rows so that replayed forwards over these slots have few rows.

        Such a forward reads the first rows, those of other slots too. Up to twice as many rows as needed are read, so
        that rows do not move whenever a slot pauses.
        """
        rows = sorted(self._row_of[slot] for slot in slots)
        if bucket_rows(rows[-1] + 1) > 2 * bucket_rows(len(rows)):
            self._move_into(rows, 0)

    def line_up(self, first: Sequence[int], others: Sequence[int], *, in_front: bool) -> None:
        """Move rows so that two forwards, over some slots and over others, each read one view.

        Args:
            first: The slots whose rows come before those of the others.
            in_front: Whether forwards are replayed, and read the first rows of all.
        """
        slots = [*first, *others]
        if in_front:
            self.gather_in_front(slots)
        else:
            self.gather(slots)
        begin = 0 if in_front else min(self._row_of[slot] for slot in slots)
        self._move_into(sorted(self._row_of[slot] for slot in first), begin)

    def _move_into(self, rows: Sequence[int], first: int) -> None:
        """Move rows so that they are neighbours, from the row `first` on. They change places with those that are
        there.
        """
        window = range(first, first + len(rows))
        slot_of = {row: slot for slot, row in self._row_of.items()}
        free = [row for row in window if row not in rows]
        for here, there in zip([row for row in rows if row not in window], free, strict=True):
            one, other = slot_of[here], slot_of[there]
            self._swap(here, there, max(self._used[one], self._used[other]))
            self._row_of[one], self._row_of[other] = there, here

    def keys_values(
        self, slot: int, layer: int, length: int
    ) -> tuple[Float[Tensor, "length heads dim"], Float[Tensor, "length heads value_dim"]]:
        """Views of a slot's first keys and values in a layer, valid until the next call of any method.

        Raises:
            KeyError: The layer keeps none; it shares another's.
        """
        (keys, values), row = self._entries[layer], self._row_of[slot]
        return self._storages[keys][row, :length], self._storages[values][row, :length]

    def _copy(self, source: int, target: int, used: int) -> None:
        # A slot that was opened and never extended may lie in a row that storage has not grown to yet.
        for storage in self._storages if used else ():
            storage[target, :used].copy_(storage[source, :used])
            self.bytes_moved += storage[target, :used].nbytes

    def _swap(self, one: int, other: int, used: int) -> None:
        self._reserve(used)
        for storage in self._storages if used else ():
            kept = storage[one, :used].clone()
            storage[one, :used].copy_(storage[other, :used])
            storage[other, :used].copy_(kept)
            self.bytes_moved += 2 * kept.nbytes

    def places(
        self, slots: Sequence[int], used: Sequence[int], counts: Int[np.ndarray, " slots"], width: int
    ) -> Int[np.ndarray, "slots width"]:
        """Where the next forward writes: the last `counts[i]` of a slot's first `used[i]` positions, then padding.

        Storage grows here if it must.
        """
        self._reserve(max(used))
        self._used.update(zip(slots, used, strict=True))
        rows = np.array([self._row_of[s] for s in slots])
        ends, numbers = np.asarray(used)[:, None], counts[:, None]
        columns = np.arange(width)
        within = np.where(columns < numbers, ends - numbers + columns, self.capacity - 1)
        return rows[:, None] * self.capacity + within

    def run(self, slot: int, used: int, positions: Int[Tensor, "_ _"]) -> Int[Tensor, "_ _"]:
        """Where the next forward writes if it extends one slot by the positions below `used`; storage may grow."""
        self._reserve(used)
        self._used[slot] = used
        return positions + self._row_of[slot] * self.capacity

    def _reserve(self, used: int) -> None:
        rows, capacity = self.num_rows, self.capacity
        while rows < len(self._row_of):
            rows = min(2 * rows, max(rows, self._max_slots))
        if capacity <= used:
            # A long prompt gets what it needs and an eighth for its output: doubling could take twice as much.
            enough = _round_up(used + used // 8 + 1)
            capacity = min(max(2 * capacity, enough), self._max_capacity)
        if self._most_bytes is not None and rows * capacity * self.position_bytes > self._most_bytes:
            rows = max(len(self._row_of), self._least_rows)
            capacity = min(self._fitting(rows), self._max_capacity)
            if capacity <= max([used, *self._used.values()]):
                raise RuntimeError(f"{rows} slots of {used} tokens do not fit in memory at once")
        if (rows, capacity) != (self.num_rows, self.capacity):
            self._grow(rows, capacity)

    def _fitting(self, rows: int) -> int:
        """How many places each of so many rows may have."""
        if self._most_bytes is None:
            return self._max_capacity
        return self._most_bytes // (rows * self.position_bytes) // _STEP * _STEP

    def holds(self, count: int, used: int) -> bool:
        """Whether so many slots fit in memory at once, if the longest has so many tokens and nodes."""
        return min(used, self._max_capacity - 1) < self._fitting(max(count, self._least_rows))

    def reserve_all(self, share: float) -> None:
        """Allocate all that the slots can come to need, so that storage stays where it is, unless this takes more than
        a share of the device's free memory.
        """
        size, free = (max(self.num_rows, self._max_slots), self._max_capacity), free_bytes(self._device)
        need = self.position_bytes * size[0] * size[1]
        fits = self._most_bytes is None or need <= self._most_bytes
        if fits and free is not None and need <= share * free and size != (self.num_rows, self.capacity):
            self._grow(*size)

    def _grow(self, rows: int, capacity: int) -> None:
        self.num_rows, self.capacity = rows, capacity
        self.generation += 1
        for i, (shape, device) in enumerate(zip(self._shapes, self._devices, strict=True)):
            old, self._storages[i] = self._storages[i], self._allocated(shape, device)
            kept = slice(min(len(old), rows)), slice(min(old.shape[1], capacity))
            self._storages[i][kept].copy_(old[kept])
            if old.is_cuda and torch.cuda.is_initialized():
                # PEARL grows a cache on a stream of its own. Until that has copied it, the memory stays taken.
                old.record_stream(torch.cuda.current_stream(old.device))
        self._parts = {}

    def view(self, used: int, *, doubling: bool = False) -> int:
        """How many positions a forward reads, where none of its slots has more than `used`.

        A multiple of 64, or with `doubling` a power of two; never more than there are.
        """
        wanted = max(FIRST, 1 << (used - 1).bit_length()) if doubling else _round_up(used)
        return min(wanted, self.capacity)

    def padding(self, count: int) -> Int[np.ndarray, " rows"]:
        """The place of each of the first rows that belongs to no slot."""
        return np.arange(1, count + 1) * self.capacity - 1

    def bucket(self, rows: Sequence[int]) -> int:
        """How many rows, from the first on, a replayed forward over these rows has."""
        return min(bucket_rows(max(rows) + 1), self.num_rows)

    def window(self, slots: Sequence[int], places: Int[Tensor, "..."], view: int) -> Window:
        """What the next forward reads and extends; valid until the next call of any method.

        Args:
            slots: One per row of the batch, in ascending order of their rows.
            places: What `places` or `run` returned, on the device.
            view: How many positions the forward reads.
        """
        rows = [self._row_of[s] for s in slots]
        first, last, flat = rows[0], rows[-1] + 1, places.reshape(-1)
        if last - first > len(rows):
            select = torch.tensor(rows).to(self._device, non_blocking=True)
            return self._window(self._entries, self._storages, flat, view, select)
        if first:
            flat = flat - first * self.capacity
        return self._window(self._entries, self._between(first, last), flat, view)

    def window_in_front(self, num_rows: int, places: Int[Tensor, "rows width"], view: int) -> Window:
        """What a forward over the first rows reads and extends, as long as `generation` stays."""
        return Window(self._entries, self._between(0, num_rows), places.reshape(-1), view)

    def _between(self, first: int, last: int) -> Sequence[Float[Tensor, "rows capacity heads dim"]]:
        """The storages from one row to another."""
        if (first, last) not in self._parts:
            self._parts[first, last] = [storage[first:last] for storage in self._storages]
        return self._parts[first, last]

    def move(self, moves: Mapping[int, tuple[Int[np.ndarray, " _"], Int[np.ndarray, " _"]]]) -> None:
        """Per slot, copy positions (the first array) to positions (the second); all slots in one copy per tensor."""
        offsets = [(self._row_of[slot] * self.capacity, pair) for slot, pair in moves.items()]
        sources = np.concatenate([offset + pair[0] for offset, pair in offsets])
        targets = np.concatenate([offset + pair[1] for offset, pair in offsets])
        both = torch.from_numpy(np.stack([sources, targets]))
        on = {device: both.to(device, non_blocking=True) for device in dict.fromkeys(self._devices)}
        for storage, device in zip(self._storages, self._devices, strict=True):
            flat, (source, target) = storage.flatten(0, 1), on[device]
            moved = flat.index_select(0, source)
            flat.index_copy_(0, target, moved)
            self.bytes_moved += moved.nbytes

    def shorten(self, slot: int, used: int) -> None:
        """Note that a slot's positions from `used` on are worth nothing."""
        self._used[slot] = used
