"""How often a drafter finds a draft: a model always does, one that looks tokens up finds none in new text."""

from dataclasses import dataclass

FADE = 0.5 ** (1 / 200)
"""Weight of earlier steps, per step: half after 200 steps, with drafts or without."""
WEIGHT = 4.0
"""As how many drafts the rate that was known before counts."""


@dataclass(frozen=True, kw_only=True)
class Hits:
    """Counts of drafts that were asked for, which fade with each step.

    Attributes:
        asked: How many there were.
        found: How many of them had a token.

    Example:
        >>> hits = Hits().after(asked=12, found=2)
        >>> round(hits.rate(), 2), round(Hits().rate(before=0.3), 2)
        (0.38, 0.3)
    """

    asked: float = 0.0
    found: float = 0.0

    def after(self, *, asked: int, found: int) -> "Hits":
        """The counts after one more step, in which so many drafts were asked for."""
        return Hits(asked=FADE * self.asked + asked, found=FADE * self.found + found)

    def rate(self, before: float = 1.0) -> float:
        """The probability that a draft is found.

        Args:
            before: What it was taken to be before these counts.
        """
        return (self.found + WEIGHT * before) / (self.asked + WEIGHT)

    def variance(self, before: float = 1.0) -> float:
        """The variance of the rate, that of a beta distribution."""
        rate = self.rate(before)
        return rate * (1 - rate) / (self.asked + WEIGHT + 1)

    def at_most(self, asked: float) -> "Hits":
        """The same rate, from fewer drafts."""
        weight = min(1.0, asked / max(self.asked, 1e-9))
        return Hits(asked=weight * self.asked, found=weight * self.found)


NO_HITS = Hits()
"""Nothing was asked for yet."""
