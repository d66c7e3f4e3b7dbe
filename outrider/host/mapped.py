"""Memory that is mapped from files: pages of it need not stay in memory, because the files still have them."""

import ctypes
import mmap
import re
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+)\s")


def release_pages(tensors: Iterable[Tensor], smaps: Path = Path("/proc/self/smaps")) -> int:
    """Give back the memory of tensors that are mapped from files. Whoever reads them gets it again, from the files.

    Tensors that lie elsewhere stay as they are, and so do those of a file of which a byte was written in memory. Does
    nothing on systems other than Linux. Returns the bytes that the system keeps no page of.
    """
    advise = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_DONTNEED") else None
    addresses = sorted(tensor.data_ptr() for tensor in tensors if tensor.device.type == "cpu" and tensor.nbytes)
    released = 0
    for begin, end in _unwritten(smaps) if advise is not None and addresses else ():
        if any(begin <= address < end for address in addresses):
            assert advise is not None
            failed = advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)
            released += 0 if failed else end - begin
    return released


def _unwritten(smaps: Path) -> list[tuple[int, int]]:
    """Where files are mapped of which this process has written nothing: begin and end of each mapping."""
    try:
        lines = smaps.read_text(errors="replace").splitlines()
    except OSError:
        return []
    found, mapping = list[tuple[int, int]](), None
    for line in lines:
        if (header := _MAPPING.match(line)) is not None:
            begin, end, rights, inode = header.groups()
            # Shared memory may be written by others.
            mapping = (int(begin, 16), int(end, 16)) if inode != "0" and rights.endswith("p") else None
        elif mapping is not None and line.startswith("Anonymous:") and line.split()[1] == "0":
            found.append(mapping)
    return found
