"""The few sizes of the forwards that a GPU replays: each size is recorded once and takes memory."""

WIDTHS = (1, 4, 8, 16, 32, 64)
"""Columns of a replayed forward."""
TOKENS = 512
"""Most tokens of a replayed forward, all rows together. A longer forward keeps a GPU busy, however it is launched."""


def bucket_rows(count: int) -> int:
    """Rows of a replayed forward over this many slots: a power of two.

    Example:
        >>> [bucket_rows(count) for count in (1, 2, 3, 9, 32)]
        [1, 2, 4, 16, 32]
    """
    return 1 << (count - 1).bit_length()


def bucket_width(count: int, rows: int) -> int | None:
    """Columns of a replayed forward over `rows` slots with at most `count` nodes each; None where it is too large.

    Example:
        >>> bucket_width(6, rows=3), bucket_width(65, rows=1), bucket_width(33, rows=9)
        (8, None, None)
    """
    width = next((width for width in WIDTHS if width >= count), None)
    return None if width is None or width * bucket_rows(rows) > TOKENS else width
