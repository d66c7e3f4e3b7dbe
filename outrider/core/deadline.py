"""When a part of the work must end, so that a command ends in time."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """A moment.

    Attributes:
        at: The moment, as the clock has it; infinity never comes.
        clock: Seconds that only go forwards.
    """

    at: float = math.inf
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """So many seconds from now.

        Example:
            >>> Deadline.after(0).passed, Deadline().passed
            (True, False)
        """
        return cls(at=time.monotonic() + seconds)

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return self.clock() >= self.at

    @property
    def left(self) -> float:
        """Seconds that are left; below 0 behind the moment."""
        return self.at - self.clock()

    def part(self, share: float) -> "Deadline":
        """When a share of the time that is left has passed."""
        left = self.left
        return self if math.isinf(left) else Deadline(at=self.at - (1 - share) * left, clock=self.clock)


ENDLESS = Deadline()
"""No end."""
