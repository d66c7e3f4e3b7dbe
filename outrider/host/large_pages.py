"""Memory for weights and long contexts in large pages, where the system gives them when asked.

A processor that reads all weights for each token spends a part of its time on finding pages of 4 KiB. Two threads of an
AMD EPYC (Zen 4) read 800 MB at 34 GB/s from pages of 2 MiB and at 26 GB/s from small ones; one thread at 29 and 18.
Linux gives large pages by itself where `transparent_hugepage/enabled` is `always`. Where it is `madvise`, the default
of many systems, a program has to ask before it writes.
"""

import math
import mmap
import threading
import weakref
from collections.abc import Sequence

import torch
from jaxtyping import Shaped, UInt8
from torch import Tensor

REGION = 64 << 20
"""Bytes that are asked for at once, for several tensors. Only what is written takes memory."""
SMALL = 64 << 10
"""Bytes from which on memory comes from a region."""
LARGE = 2 << 20
"""Bytes of a large page."""
LINE = 64
"""Bytes of a line of a cache, at which each tensor begins."""

_lock = threading.Lock()
_newest: weakref.ref[mmap.mmap] | None = None
_used = 0


def empty(rows: int, columns: int) -> UInt8[Tensor, "rows columns"]:
    """Bytes that are not set, in large pages where the system has them.

    Tensors share regions of memory, one behind another. A region is freed with the last of its tensors.

    Example:
        >>> empty(3, 1 << 20).shape
        torch.Size([3, 1048576])
    """
    global _newest, _used
    size = rows * columns
    if size >= SMALL and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            with _lock:
                memory = _newest() if _newest is not None else None
                if memory is None or _used + size > len(memory):
                    memory, _used = _region(max(REGION, size)), 0
                    _newest = weakref.ref(memory)
                tensor = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=_used)
                _used += -(-size // LINE) * LINE
            return tensor.view(rows, columns)
        except OSError:
            # A system without them, or with a limit on what is asked for at once.
            pass
    return torch.empty(rows, columns, dtype=torch.uint8)


def zeros(size: Sequence[int], dtype: torch.dtype) -> Shaped[Tensor, "..."]:
    """Zeros on the CPU, in large pages of their own if they fill one and the system has them.

    Example:
        >>> zeros((2, 3), torch.float32).sum()
        tensor(0.)
    """
    count = math.prod(size) * dtype.itemsize
    if count >= LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory = torch.frombuffer(_region(count + LARGE), dtype=torch.uint8)
        except OSError:
            pass
        else:
            first = -memory.data_ptr() % LARGE
            return memory[first : first + count].view(dtype).view(*size)
    return torch.zeros(*size, dtype=dtype)


def _region(size: int) -> mmap.mmap:
    """Memory of this process alone. Raises OSError where there is none."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
