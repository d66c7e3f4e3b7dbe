"""The memory that a new cache may count on: what is free, less what the other caches of this process will come to need.

A cache begins small and grows. So the memory that is free when a second one is made, such as a drafter's, is partly
promised to the first. On CPUs memory is shared with other processes and can be swapped; there, what is free now counts.
"""

from weakref import WeakKeyDictionary

import torch

from outrider.lm.slots.cache import SlotCache, free_bytes

_PROMISED: WeakKeyDictionary[SlotCache, tuple[torch.device, int]] = WeakKeyDictionary()


def promise(cache: SlotCache, device: torch.device, num_bytes: int) -> None:
    """Note how many bytes a cache can come to need, as long as it lives."""
    _PROMISED[cache] = (device, num_bytes)


def available_bytes(device: torch.device) -> int | None:
    """Bytes that a new cache on a device may count on; None if unknown."""
    free = free_bytes(device)
    if free is None or device.type == "cpu":
        return free
    growing = (most - cache.num_bytes for cache, (where, most) in _PROMISED.items() if where == device)
    return max(0, free - sum(max(0, each) for each in growing))
