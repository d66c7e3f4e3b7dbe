"""Slots: which are open, what each holds, and which pending nodes a commit keeps. For models and heads."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.lm.protocol import Segment
from outrider.lm.slots.budget import SlotRoom, available_over, promise, shares_of
from outrider.lm.slots.cache import Layer, SlotCache


@runtime_checkable
class Holding(Protocol):
    """The contents of a slot that all models have.

    Attributes:
        length: Committed tokens.
    """

    length: int


Content = TypeVar("Content", bound=Holding)
BRANCHES = 512
"""Most pending nodes that a slot may hold beyond its longest context. Side branches take space but add no depth."""


def _nothing() -> Int[np.ndarray, " nodes"]:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Pending:
    """The nodes behind the committed tokens of one slot, in the order in which they were appended.

    Attributes:
        parents: Number of each node's parent; -1 is the newest committed token.
        depths: Distance from the newest committed token, minus one: the node's position is `length + depth`.
        chain: Whether each node is the child of the one before.
    """

    parents: Int[np.ndarray, " nodes"] = field(default_factory=_nothing)
    depths: Int[np.ndarray, " nodes"] = field(default_factory=_nothing)
    chain: bool = True

    def __len__(self) -> int:
        return len(self.parents)

    def grown(self, count: int, parents: Int[np.ndarray, " new"] | None) -> "Pending":
        """The nodes with `count` more. Without `parents` the new nodes continue a chain from the newest node.

        Raises:
            ValueError: A node's parent is not a number below its own, or there is not one parent per node.
        """
        first = len(self)
        if parents is None or (self.chain and len(parents) == count == 1 and parents[0] == first - 1):
            return self._chained(count)
        parents = np.asarray(parents, dtype=np.int64)
        numbers = np.arange(first, first + count)
        if parents.shape != (count,) or (parents < -1).any() or (parents >= numbers).any():
            raise ValueError(f"parents of nodes {first}..{first + count - 1} must stand before them, got {parents}")
        if self.chain and (parents == numbers - 1).all():
            return self._chained(count)
        above, depths = parents, np.zeros(count, dtype=np.int64)
        while (inside := above >= first).any():
            depths += inside
            above = np.where(inside, parents[np.maximum(above - first, 0)], above)
        if first:
            depths += np.where(above >= 0, self.depths[above] + 1, 0)
        depths = np.concatenate([self.depths, depths])
        return Pending(parents=np.concatenate([self.parents, parents]), depths=depths, chain=False)

    def _chained(self, count: int) -> "Pending":
        first = len(self)
        if self.chain:
            return _chain(first + count)
        depth = int(self.depths[-1]) + 1
        return Pending(
            parents=np.concatenate([self.parents, np.arange(first - 1, first + count - 1)]),
            depths=np.concatenate([self.depths, np.arange(depth, depth + count)]),
            chain=False,
        )

    def is_path(self, path: Sequence[int]) -> bool:
        """Whether these nodes form a path from the newest committed token."""
        if self.chain:
            return len(path) <= len(self) and all(node == i for i, node in enumerate(path))
        nodes = np.asarray(path, dtype=np.int64)
        if len(nodes) and (nodes.min() < 0 or nodes.max() >= len(self)):
            return False
        return bool((self.parents[nodes] == np.concatenate([[-1], nodes[:-1]])[: len(nodes)]).all())


@functools.lru_cache(maxsize=1024)
def _chain(count: int) -> Pending:
    """Nodes each of which is the child of the one before."""
    return Pending(parents=np.arange(-1, count - 1), depths=np.arange(count))


@dataclass(kw_only=True)
class Slot:
    """What one slot holds; changes in place.

    Attributes:
        length: Committed tokens.
        pending: The nodes behind them.
    """

    length: int = 0
    pending: Pending = field(default_factory=Pending)

    @property
    def used(self) -> int:
        """Tokens and nodes together."""
        return self.length + len(self.pending)


class SlotTable(Generic[Content]):
    """The open slots of one model, with the contents and the cache row of each. Changes in place.

    Attributes:
        cache: Where keys and values lie.
        max_slots: Most slots at once.
        room: How long slots may become.

    Args:
        cache: The cache, which gives each open slot a row.
        max_slots: Most slots at once.
        room: How long slots may become.
    """

    spare = 0
    """Most pending nodes that a slot may hold beyond its longest context."""

    def __init__(self, cache: SlotCache, *, max_slots: int, room: SlotRoom) -> None:
        self.cache = cache
        self.max_slots = max_slots
        self.room = room
        self._contents: dict[int, Content] = {}

    def __len__(self) -> int:
        """Number of open slots."""
        return len(self._contents)

    def holds(self, lengths: Sequence[int]) -> bool:
        """Whether slots of so many tokens each, and their pending nodes, fit in memory at once."""
        return self.cache.holds(len(lengths), max(lengths, default=0) + self.spare)

    def __getitem__(self, slot: int) -> Content:
        """The contents of an open slot. Raises RuntimeError if it is not open."""
        if slot not in self._contents:
            raise RuntimeError(f"slot {slot} is not open; open slots: {sorted(self._contents)}")
        return self._contents[slot]

    def contents(self) -> list[Content]:
        """The contents of all open slots."""
        return list(self._contents.values())

    def open(self, content: Content) -> int:
        """Take a free slot. Raises RuntimeError when none is free."""
        if len(self._contents) == self.max_slots:
            raise RuntimeError(f"all {self.max_slots} slots are taken (max_slots={self.max_slots})")
        slot = next(s for s in range(self.max_slots) if s not in self._contents)
        self._contents[slot] = content
        self.cache.open(slot)
        return slot

    def release(self, slot: int, *, clean: bool = False) -> None:
        """Release a slot."""
        del self._contents[self._checked(slot)]
        with torch.inference_mode():
            self.cache.close(slot, clean=clean)

    def _checked(self, slot: int) -> int:
        self[slot]
        return slot


class OverSlots(Generic[Content]):
    """The base of all models over slots.

    Attributes:
        max_slots: Most slots at once.
    """

    _slots: SlotTable[Content]

    @property
    def cache(self) -> SlotCache:
        """Where keys and values lie."""
        return self._slots.cache

    @property
    def max_slots(self) -> int:
        return self._slots.max_slots

    @property
    def bytes_moved(self) -> int:
        """Bytes of the cache copied so far: accepted paths moved into place, slots moved or copied."""
        return self.cache.bytes_moved

    @property
    def possible_context(self) -> int:
        """The largest `max_context` that may be asked for; more than `max_context` if memory is short for all slots."""
        return self._slots.room.possible_context

    @property
    def overcommitted(self) -> bool:
        """Whether slots of `max_context` tokens do not fit all at once."""
        return self._slots.room.most_bytes is not None

    def holds(self, lengths: Sequence[int]) -> bool:
        """Whether slots of so many tokens each, and their pending nodes, fit in memory at once."""
        return self._slots.holds(lengths)

    def release(self, slot: int, *, clean: bool = False) -> None:
        """Release the slot; with `clean` overwrite its cache, which may hold NaN."""
        self._slots.release(slot, clean=clean)

    def length(self, slot: int) -> int:
        """Committed tokens of a slot."""
        return self._slots[slot].length

    def keys_values(
        self, slot: int, layer: int
    ) -> tuple[Float[Tensor, "length heads dim"], Float[Tensor, "length heads value_dim"]]:
        """A slot's committed keys and values in a layer: read-only views, valid until the model's next call.

        Raises:
            KeyError: The layer keeps none of its own.
        """
        return self.cache.keys_values(slot, layer, self.length(slot))


class Slots(SlotTable[Slot]):
    """Slots whose pending nodes may branch. A commit moves the accepted path into place.

    Attributes:
        max_context: Most tokens of one slot, pending nodes included, along any path.
    """

    spare = BRANCHES

    def __init__(self, cache: SlotCache, *, max_slots: int, room: SlotRoom) -> None:
        super().__init__(cache, max_slots=max_slots, room=room)
        self.max_context = room.max_context

    @classmethod
    def fitting(
        cls,
        layers: Mapping[int, Layer],
        *,
        max_slots: int,
        max_context: int | None,
        limit: int | None,
        device: torch.device,
        num_rows: int,
        activations: int = 0,
        overcommit: bool = False,
    ) -> "Slots":
        """Slots with a new cache that fits in the memory that no other cache of the device will need.

        Args:
            layers: What each layer keeps, as a `Probe` recorded it.
            max_slots: Most slots at once.
            max_context: Most tokens of one slot. None takes as many as `limit` and memory allow.
            limit: Most tokens that the model allows; None where there is no limit.
            device: Where the cache lies, but for layers that are elsewhere.
            num_rows: Rows that the cache begins with. Compiled forwards begin with 2, because a compiler treats a size
                of 1 as a kind of its own.
            activations: Bytes that forwards need besides weights and caches, on a GPU.
            overcommit: Whether a `max_context` may be asked for that does not fit for all slots at once.

        Raises:
            InputError: The cache does not fit.
        """
        shares = shares_of(layers, device)
        room = SlotRoom.of(
            layers,
            max_slots=max_slots,
            max_context=max_context,
            limit=limit,
            free=available_over(shares, activations),
            spare=BRANCHES,
            num_rows=num_rows,
            overcommit=overcommit,
        )
        cache = SlotCache(
            layers,
            max_slots=max_slots,
            max_context=room.max_context + BRANCHES,
            device=device,
            num_rows=num_rows,
            most_bytes=room.most_bytes,
        )
        promise(cache, shares, room.promised(layers, max_slots, BRANCHES), activations)
        return cls(cache, max_slots=max_slots, room=room)

    def truncate(self, slot: int, length: int) -> None:
        """Forget committed tokens from `length` on, and all pending nodes."""
        state = self[slot]
        if not 0 <= length <= state.length:
            raise ValueError(f"slot {slot} has {state.length} committed tokens, cannot keep {length}")
        state.length, state.pending = length, _chain(0)
        self.cache.shorten(slot, length)

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        """Per slot, keep the pending nodes of one root path, by number and in order; drop the other pending nodes.

        Slots that are not named keep their pending nodes. If the path is already in place, as the accepted part of a
        chain is, no memory moves.
        """
        moves = {}
        for slot, path in paths.items():
            state = self[slot]
            if not state.pending.is_path(path):
                raise ValueError(f"{list(path)} is no path from the root through the pending nodes of slot {slot}")
            if state.pending.chain:
                continue
            nodes, places = np.asarray(path, dtype=np.int64), np.arange(len(path))
            away = nodes != places
            if away.any():
                moves[slot] = (state.length + nodes[away], state.length + places[away])
        if moves:
            with torch.inference_mode():
                self.cache.move(moves)
        for slot, path in paths.items():
            state = self[slot]
            state.length, state.pending = state.length + len(path), _chain(0)
            self.cache.shorten(slot, state.length)

    def copy(self, source: int, length: int) -> int:
        """A new slot with the first `length` committed tokens of another. Raises RuntimeError when no slot is free."""
        if not 0 <= length <= self[source].length:
            raise ValueError(f"slot {source} has {self[source].length} committed tokens, cannot copy {length}")
        slot = self.open(Slot(length=length))
        with torch.inference_mode():
            self.cache.copy(source, slot, length)
        return slot

    def grown(self, segments: Sequence[Segment]) -> Mapping[int, Pending]:
        """Per slot, the pending nodes together with the new ones; changes nothing.

        Raises:
            RuntimeError: A slot would hold more than `max_context` tokens.
        """
        grown: dict[int, Pending] = {}
        for segment in segments:
            if segment.slot in grown:
                raise ValueError(f"slot {segment.slot} stands in two segments of one forward")
            grown[segment.slot] = self.longer(segment.slot, segment.tokens.shape[0], segment.parents)
        return grown

    def longer(self, slot: int, count: int, parents: Int[np.ndarray, " new"] | None = None) -> Pending:
        """A slot's pending nodes together with `count` new ones; changes nothing.

        Raises:
            RuntimeError: The slot would hold more than `max_context` tokens.
        """
        state = self[slot]
        pending = state.pending.grown(count, parents)
        deepest = state.length + 1 + int(pending.depths.max(initial=-1))
        if deepest > self.max_context or state.used + count > self.max_context + BRANCHES:
            raise RuntimeError(
                f"slot {slot} holds {state.length} committed and {len(state.pending)} pending tokens; "
                f"{count} more pass max_context={self.max_context}"
            )
        return pending

    def keep(self, slot: int, pending: Pending) -> None:
        """Store the pending nodes that `grown` returned, after the forward over them."""
        self[slot].pending = pending
