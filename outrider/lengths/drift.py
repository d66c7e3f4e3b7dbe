"""Notices that a table of costs is off as a whole. It changes no choice."""

import math
from statistics import median

WINDOW, WINDOWS = 64, 3
"""Steps of a window, and how many windows in a row must be off."""
SLOWER, FASTER = 2.0, 1.25
"""By what factor steps are slower or faster than their costs when the costs are off. Costs are those of undisturbed
steps, so that usual steps are a little slower."""


class Drift:
    """Compares steps with their costs. Changes in place.

    Attributes:
        detected: Whether three windows of steps in a row took twice their costs, or less than four fifths.
        ratio: What the steps of the last window took, over their costs; 1 before the first one.

    Example:
        >>> drift = Drift()
        >>> for _ in range(3 * 64):
        ...     drift.note(seconds=0.03, cost=0.01)
        >>> drift.detected
        True
    """

    def __init__(self) -> None:
        self.detected = False
        self.ratio = 1.0
        self._window: list[float] = []
        self._off = 0

    def note(self, seconds: float, cost: float) -> None:
        """Note what a step took and what it costs by the table."""
        self._window.append(math.log(max(seconds, 1e-9) / cost))
        if len(self._window) == WINDOW:
            over = median(self._window)
            self.ratio = math.exp(over)
            self._off = self._off + 1 if over > math.log(SLOWER) or over < -math.log(FASTER) else 0
            self._window.clear()
            self.detected = self.detected or self._off >= WINDOWS
