"""Memory that is given back: pages that are mapped from files, which still have them, and what the allocator kept."""

import ctypes
import mmap
import sys
from bisect import bisect_left
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from torch import Tensor

ENTRY = 8
"""Bytes of pagemap for each page: bit 63 says that it is in memory, 62 that it is swapped, 61 that a file holds it."""


def release_pages(tensors: Iterable[Tensor], process: Path = Path("/proc/self")) -> int:
    """Give back the memory of tensors that are mapped from files. Whoever reads them gets it again, from the files.

    Tensors that lie elsewhere stay as they are, and so do those of a file of which a byte was written in memory. Does
    nothing on systems other than Linux. Returns the bytes that the system keeps no page of.
    """
    advise = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_DONTNEED") else None
    addresses = sorted(tensor.data_ptr() for tensor in tensors if tensor.device.type == "cpu" and tensor.nbytes)
    released = 0
    try:
        for begin, end in _mappings(process / "maps") if advise is not None and addresses else ():
            first = bisect_left(addresses, begin)
            if first == len(addresses) or addresses[first] >= end or _written(process / "pagemap", begin, end):
                continue
            assert advise is not None
            failed = advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)
            released += 0 if failed else end - begin
    except OSError:
        # A system without these files keeps all.
        pass
    return released


def release_heap() -> None:
    """Give back the memory that was freed and that the C library's allocator kept. Does nothing without GNU's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _mappings(maps: Path) -> list[tuple[int, int]]:
    """Where files are mapped for this process alone: begin and end of each mapping."""
    mappings = list[tuple[int, int]]()
    for line in maps.read_text(errors="replace").splitlines():
        place, rights, _, _, inode = line.split(maxsplit=5)[:5]
        # Shared memory may be written by others.
        if inode != "0" and rights.endswith("p"):
            begin, end = place.split("-")
            mappings.append((int(begin, 16), int(end, 16)))
    return mappings


def _written(pagemap: Path, begin: int, end: int) -> bool:
    """Whether this process has written into a mapping, so that the file does not hold all of it."""
    first, last = begin // mmap.PAGESIZE, end // mmap.PAGESIZE
    with pagemap.open("rb") as file:
        file.seek(ENTRY * first)
        pages = np.frombuffer(file.read(ENTRY * (last - first)), dtype=np.uint64)
    kinds = pages >> np.uint64(61)
    # Kinds 2, 4 and 6 are in memory or swapped, and no file holds them.
    return len(pages) < last - first or bool(((kinds >= 2) & (kinds % 2 == 0)).any())
