"""Text that is printed piece by piece, and lines of standard error that do not break it."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from rich.console import Console


class StreamedText:
    """What was printed so far; changes in place.

    Attributes:
        is_open: Whether the last line has no end yet.
    """

    def __init__(self) -> None:
        self.is_open = False

    def print(self, text: str, style: str | None = None) -> None:
        """Print a piece."""
        if style is None:
            print(text, end="", flush=True)
        else:
            Console(highlight=False, soft_wrap=True).print(text, style=style, end="", markup=False)
        self.is_open = not text.endswith("\n") if text else self.is_open


@contextmanager
def streamed() -> Iterator[StreamedText]:
    """Text that is printed meanwhile, and is ended with a line break, also by an error or an interrupt.

    Where standard error is shown in the same place, as on a terminal, what is written there begins a line of its own:
    warnings, log lines, lines of progress.
    """
    text, error = StreamedText(), sys.stderr
    if _is_one_place(sys.stdout, error):
        sys.stderr = cast(TextIO, _OwnLines(error, text))
    try:
        yield text
    finally:
        sys.stderr = error
        text.print("\n")


class _OwnLines:
    """Standard error, which ends an open line of text before it writes."""

    def __init__(self, error: TextIO, text: StreamedText) -> None:
        self._error, self._text = error, text

    def write(self, words: str) -> int:
        if words and self._text.is_open:
            self._text.print("\n")
        return self._error.write(words)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._error, name)


def _is_one_place(*streams: TextIO | None) -> bool:
    """Whether streams are written to one terminal, pipe or file."""
    try:
        first, second = (os.fstat(stream.fileno()) for stream in streams if stream is not None)
    except (OSError, ValueError):
        return False
    return os.path.samestat(first, second)
