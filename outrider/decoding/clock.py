"""Where the seconds of one step go."""

import time
from collections.abc import Callable

from outrider.core.types import Timing


class Clock:
    """Fills a Timing lap by lap.

    Args:
        now: Seconds since some moment.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.timing = Timing()
        self.now = now
        self._last = now()

    def lap(self, part: str) -> None:
        """Add to a part of the timing what has passed since the last lap."""
        now = self.now()
        setattr(self.timing, part, getattr(self.timing, part) + now - self._last)
        self._last = now
