"""The memory that a new cache may count on: what is free, less what the other caches of this process will come to need,
and less what forwards need for themselves.

A cache begins small and grows. So the memory that is free when a second one is made, such as a drafter's, is partly
promised to the first. On CPUs memory is shared with other processes and can be swapped; there, what is free now counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from outrider.core.ranks import least
from outrider.core.types import InputError
from outrider.lm.slots.cache import FIRST, SHARE, Layer, SlotCache, fitting_context, free_bytes, worst_bytes

PREFILL_CHUNK, WIDE_CHUNK = 512, 2048
"""Most prompt tokens of one forward, by default: on a CPU while other requests decode and wait for it, and otherwise.
Every chunk reads all weights and the whole context before it, and a GPU launches 512 as slowly as 2,048.
"""
BUFFERS = 16
"""Tensors as wide as the hidden states that a forward holds at once. A layer's inner ones, which are wider, count as
several.
"""
NODES, COPIES = 33, 5
"""Nodes of one request whose logits are computed at once, and how often their rows are in memory, in float32, while
they become probabilities and are verified.
"""


@dataclass(frozen=True, kw_only=True)
class _Promise:
    """What a cache was promised.

    Attributes:
        device: Where it lies.
        most: Bytes that it can come to need.
        activations: Bytes that forwards over it need besides.
    """

    device: torch.device
    most: int
    activations: int


_PROMISED: WeakKeyDictionary[SlotCache, Sequence[_Promise]] = WeakKeyDictionary()


def promise(cache: SlotCache, shares: Mapping[torch.device, float], num_bytes: int, activations: int = 0) -> None:
    """Note how many bytes a cache, and the forwards over it, can come to need, as long as the cache lives.

    Args:
        shares: What part of the cache lies on each device.
    """
    _PROMISED[cache] = [
        _Promise(device=device, most=int(share * num_bytes), activations=activations)
        for device, share in shares.items()
    ]


def shares_of(layers: Mapping[int, Layer], device: torch.device) -> dict[torch.device, float]:
    """What part of the cache of these layers lies on each device.

    Args:
        device: Where layers are that do not say otherwise.

    Example:
        >>> from outrider.lm.slots.cache import StateShape
        >>> shape = StateShape(heads=1, dim=4, dtype=torch.float32)
        >>> first, second = (Layer(keys=shape, values=shape, device=torch.device("cuda", k)) for k in (0, 1))
        >>> shares_of({0: first, 1: second, 2: second, 3: second}, torch.device("cuda", 0))
        {device(type='cuda', index=0): 0.25, device(type='cuda', index=1): 0.75}
    """
    num_bytes: dict[torch.device, int] = {}
    for layer in layers.values():
        place = layer.device or device
        num_bytes[place] = num_bytes.get(place, 0) + layer.num_bytes
    whole = sum(num_bytes.values())
    return {place: count / whole for place, count in num_bytes.items()} or {device: 1.0}


def available_over(shares: Mapping[torch.device, float], activations: int = 0) -> int | None:
    """Bytes that a new cache may count on that lies on several devices: the fullest of them says how many.

    None if no device knows. Processes that hold one target together count on as much as the fullest of them has.
    """
    free_bytes = {device: available_bytes(device, activations) for device in shares}
    known = [int(free / shares[device]) for device, free in free_bytes.items() if free is not None]
    return least(min(known, default=None))


def available_bytes(device: torch.device, activations: int = 0) -> int | None:
    """Bytes that a new cache on a device may count on; None if unknown.

    Args:
        activations: Bytes that the forwards over the new cache need. Models take turns, so the most of any counts.
    """
    free = free_bytes(device)
    if free is None or device.type == "cpu":
        return free
    others = [(cache, each) for cache, promised in _PROMISED.items() for each in promised if each.device == device]
    growing = sum(max(0, promised.most - cache.bytes_on(device)) for cache, promised in others)
    needed = max([activations, *(promised.activations for _, promised in others)])
    return max(0, free - growing - needed)


def prefill_size(device: torch.device, *, decoding: bool = False) -> int:
    """Most prompt tokens of one forward on a device, by default.

    Args:
        decoding: Whether other requests decode meanwhile.
    """
    return PREFILL_CHUNK if decoding and device.type == "cpu" else WIDE_CHUNK


def activation_bytes(
    device: torch.device, *, hidden_size: int, vocab_size: int, dtype: torch.dtype, max_slots: int
) -> int:
    """Bytes that the largest forwards need besides weights and caches: a chunk of a prompt, or the logits of all
    requests and what is made of them.

    More prompt tokens than by default (`max_prefill_tokens`) must do with the share of memory that no cache gets.

    Example:
        >>> round(activation_bytes(torch.device("cuda"), hidden_size=4096, vocab_size=128_256, dtype=torch.bfloat16,
        ...                        max_slots=32) / 1e9, 2)
        3.25
    """
    chunk = prefill_size(device) * hidden_size * dtype.itemsize * BUFFERS
    logits = max_slots * NODES * vocab_size * (dtype.itemsize + COPIES * torch.float32.itemsize)
    return chunk + logits


@dataclass(frozen=True, kw_only=True)
class SlotRoom:
    """How long the slots of a new cache may become.

    Attributes:
        max_context: Most tokens of one slot.
        possible_context: The largest `max_context` that may be asked for. Slots of so many tokens may not fit all at
            once.
        most_bytes: Bytes that the cache may hold; None where all slots fit at once.
    """

    max_context: int
    possible_context: int
    most_bytes: int | None = None

    @classmethod
    def of(
        cls,
        layers: Mapping[int, Layer],
        *,
        max_slots: int,
        max_context: int | None,
        limit: int | None,
        free: int | None,
        spare: int = 0,
        num_rows: int = 1,
        overcommit: bool = False,
    ) -> "SlotRoom":
        """The room that some free memory gives.

        Args:
            max_context: Most tokens of one slot. None takes as many as `limit` and memory allow for all slots at once.
            limit: Most tokens that the model allows; None where there is no limit.
            free: Bytes; None where it is not known.
            spare: Pending nodes of a slot beyond its longest context.
            num_rows: Rows that the cache has at least.
            overcommit: Whether a `max_context` may be asked for that does not fit for all slots at once.

        Raises:
            InputError: It does not fit.
        """
        possible = 0
        if overcommit and free is not None and worst_bytes(layers, max_slots, FIRST - 1) <= free * SHARE:
            longer = None if limit is None else limit + spare
            alone = fitting_context(layers, max_slots=num_rows, max_context=None, limit=longer, free=free)
            possible = alone - spare
        try:
            fitting = fitting_context(layers, max_slots=max_slots, max_context=max_context, limit=limit, free=free)
        except InputError:
            if max_context is None or max_context > possible:
                raise
            return cls(max_context=max_context, possible_context=possible, most_bytes=int((free or 0) * SHARE) * 2 // 3)
        # What was asked for and fits is not short of memory.
        return cls(max_context=fitting, possible_context=fitting if max_context else max(fitting, possible))

    def promised(self, layers: Mapping[int, Layer], max_slots: int, spare: int = 0) -> int:
        """Bytes that the cache can come to need, while storage grows too."""
        worst = worst_bytes(layers, max_slots, self.max_context + spare)
        return worst if self.most_bytes is None else min(worst, self.most_bytes * 3 // 2)
