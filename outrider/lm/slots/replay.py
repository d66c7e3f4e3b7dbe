"""The states that a recurrent model saves per slot, and the tokens that it must be fed again to continue."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from jaxtyping import Float, Int
from torch import Tensor

from outrider.lm.hf.states import State

CHUNK = 512
"""Most tokens that are fed again in one forward."""
JOIN = 8
"""Up to this many tokens are fed again in the forward of the new ones. More tokens get their own forward."""
BORDERS = 16
"""Most states kept of one slot's pending tokens."""


@dataclass(kw_only=True)
class StatefulSlot:
    """The contents of one slot; changes in place.

    Attributes:
        tokens: Committed tokens, then pending ones.
        length: Committed tokens.
        borders: The saved states of the recurrent layers, by number of tokens; None before the first token.
        fed: Number of tokens that were fed at least once.
    """

    tokens: Int[Tensor, " used"]
    length: int = 0
    borders: dict[int, State | None] = field(default_factory=lambda: {0: None})
    fed: int = 0

    @property
    def used(self) -> int:
        return len(self.tokens)

    def shorten(self, length: int, least: int) -> None:
        """Keep so many tokens, all of them committed, and the states from which `least` tokens can be fed to go on."""
        self.tokens, self.length, self.fed = self.tokens[:length], length, min(self.fed, length)
        self.prune(least)

    def prune(self, least: int) -> None:
        """Drop the states that are not needed: behind all tokens, long before the committed ones, or too many."""
        behind = {self.start(self.length + more, least) for more in (1, least)}
        pending = sorted(border for border in self.borders if self.length < border <= self.used)
        self.borders = {border: self.borders[border] for border in sorted(behind | set(pending[-BORDERS:]))}

    def start(self, end: int, least: int) -> int:
        """The newest border from which at least so many tokens lead to `end`, or the beginning."""
        return max(border for border in self.borders if border == 0 or end - border >= least)


@dataclass(kw_only=True)
class ReplaySegment:
    """One segment on its way through one or more forwards.

    Attributes:
        slot: The slot.
        tokens: All its tokens, the new ones last.
        first: Where the new ones begin.
        wanted: How many of the last ones' logits are wanted.
        pieces: Bounds of what is fed, one forward after the other; the first begins at a border.
        state: What the recurrent layers remember where the next piece begins.
        borders: New ones.
        logits: The wanted logits so far.
        taps: Hidden states of the new tokens so far.
    """

    slot: int
    tokens: Int[Tensor, " used"]
    first: int
    wanted: int
    pieces: Sequence[tuple[int, int]]
    state: State | None
    borders: dict[int, State | None] = field(default_factory=dict)
    logits: list[Float[Tensor, "_ vocab"]] = field(default_factory=list)
    taps: dict[int, list[Float[Tensor, "_ hidden"]]] = field(default_factory=dict)

    def columns(self, end: int) -> int:
        """How many of the last columns of the piece that ends there have logits that are wanted."""
        start = next(s for s, e in self.pieces if e == end)
        return max(0, end - max(start, len(self.tokens) - self.wanted))


def pieces(start: int, first: int, end: int, least: int, stepwise: bool) -> list[tuple[int, int]]:
    """Bounds of the forwards that bring a slot from a border at `start` over its new tokens from `first` to `end`.

    Example:
        >>> pieces(90, 95, 101, 1, False), pieces(50, 95, 101, 1, False)
        ([(90, 101)], [(50, 95), (95, 101)])
        >>> pieces(0, 95, 97, 1, True), pieces(95, 95, 97, 1, True)
        ([(0, 95), (95, 96), (96, 97)], [(95, 96), (96, 97)])
    """
    if stepwise:
        whole = start if start else (first or end)
        return list(pairwise([start, *range(max(whole, start + 1), end + 1)]))
    again = [] if first - start <= JOIN else [*range(start + CHUNK, first, CHUNK), first]
    cuts = [start]
    for cut in again:
        if cut - cuts[-1] >= least and end - cut >= least:
            cuts.append(cut)
    return list(pairwise([*cuts, end]))
