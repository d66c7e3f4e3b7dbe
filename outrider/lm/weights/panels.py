"""Blocks of a file as panels, by the function of `panels.cpp`."""

import ctypes
import functools
from pathlib import Path

from jaxtyping import Int, UInt8
from torch import Tensor

from outrider.host.native import native


def fill(
    data: UInt8[Tensor, "panels panel_bytes"],
    blocks: UInt8[Tensor, "file_rows row_bytes"],
    number: int,
    num_blocks: int,
    order: Int[Tensor, " rows"] | None,
) -> bool:
    """Fill panels with the blocks of a file. False where the function cannot be built here.

    Args:
        data: The panels.
        blocks: The bytes of each row of the file.
        number: The kind of the blocks, as GGUF numbers it.
        num_blocks: Blocks of a row.
        order: Which row of the file each row of the panels is; None means the order of the file.
    """
    library = _library()
    if library is None or data.device.type != "cpu" or not blocks.is_contiguous():
        return False
    order = None if order is None else order.long().contiguous()
    place = None if order is None else order.data_ptr()
    failed = library.outrider_panels(blocks.data_ptr(), len(blocks), num_blocks, place, number, data.data_ptr())
    return not failed


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The function of `panels.cpp`; None if it cannot be built here."""
    library = native(Path(__file__).with_name("panels.cpp"))
    if library is not None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        library.outrider_panels.argtypes = [pointer, number, number, pointer, number, pointer]
    return library
