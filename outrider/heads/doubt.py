"""Another way to read the files of a head: what a probe tries where a head drafts badly."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """A head with the same tensors that computes something else.

    Attributes:
        about: What it is about, such as `taps`. Of the doubts about one thing at most one is right.
        means: The cause, if the head drafts better so; the beginning of a sentence.
        advice: What to do then; the end of a sentence.
        changes: Objects, names of their attributes, and the values that these have then.
    """

    about: str
    means: str
    advice: str
    changes: Sequence[tuple[Any, str, Any]]

    @contextmanager
    def held(self) -> Iterator[None]:
        """The head computes this in the body.

        Example:
            >>> from types import SimpleNamespace
            >>> head = SimpleNamespace(scale=1)
            >>> with Doubt(about="scale", means="", advice="", changes=[(head, "scale", 2)]).held():
            ...     print(head.scale)
            2
            >>> head.scale
            1
        """
        before = [(each, name, getattr(each, name)) for each, name, _ in self.changes]
        try:
            for each, name, value in self.changes:
                setattr(each, name, value)
            yield
        finally:
            for each, name, value in before:
                setattr(each, name, value)


def other_taps(taps: Sequence[int], num_layers: int) -> list[tuple[tuple[int, ...], str]]:
    """Taps that a head may have been trained with if its own are wrong, and in words how they differ.

    Example:
        >>> [found for found, _ in other_taps((1, 2), 3)]
        [(0, 1), (2, 3), (2, 1)]
    """
    others = [(tuple(tap + by for tap in taps), f"{'later' if by > 0 else 'earlier'} by one") for by in (-1, 1)]
    if len(taps) > 1:
        others.append((tuple(reversed(taps)), "in the opposite order"))
    if len(taps) > 2:
        swaps = [(i, i + 1) for i in range(len(taps) - 1)]
        for i, j in swaps:
            swapped = list(taps)
            swapped[i], swapped[j] = swapped[j], swapped[i]
            others.append((tuple(swapped), "in another order"))
        others.append(((*taps[1:], taps[0]), "in another order"))
        others.append(((taps[-1], *taps[:-1]), "in another order"))
    return [(each, how) for each, how in others if all(0 <= tap <= num_layers for tap in each)]
