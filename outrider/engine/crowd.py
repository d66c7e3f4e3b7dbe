"""Crowded machines: steps are many times slower if torch has more threads than there are free cores.

Torch's threads wait for each other by spinning. If one of them has no core, the others spin until it gets one.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from outrider.core.types import Step
from outrider.host.cores import CoreUsage, crowded, shares

SPAN = 0.5
"""For how many seconds of steps the cores are watched."""
IDLE = 0.25
"""Cores that nobody uses; with more of them idle, nothing shows that the threads lack cores."""


class CrowdedWarning(RuntimeWarning):
    """Torch has more threads than there are free cores."""


class Crowd:
    """Notices once, at the first steps, that other processes take cores from torch's threads. Changes in place.

    Args:
        look: Returns what the cores have done up to now.
    """

    has_warned: ClassVar[bool] = False
    """Whether a warning was given in this process."""

    def __init__(self, look: Callable[[], CoreUsage] = CoreUsage.now) -> None:
        self._look = look
        self._before: CoreUsage | None = None
        self._watched = 0.0
        self._is_judged = False

    def note(self, seconds: float, threads: int) -> str | None:
        """Note a step. Returns a sentence for the user if the machine is crowded; otherwise None.

        Args:
            seconds: Time of the target's forward.
            threads: Number of torch's threads. A single thread waits for no other, so it is never too many.
        """
        if self._is_judged or threads == 1:
            return None
        if self._before is None:
            self._before = self._look()
            return None
        self._watched += seconds
        if self._watched < SPAN:
            return None
        self._is_judged = True
        seen = shares(self._before, self._look())
        if seen is None or not crowded(seen, threads) or seen.free - seen.of_process > IDLE:
            return None
        fewer = max(1, min(int(seen.free), threads - 1))
        return (
            f"torch has {threads} threads, and other processes leave only {seen.free:.1f} cores free for them, which "
            f"can make steps many times slower; use fewer threads (threads={fewer} in Python, --threads {fewer} on the "
            "command line), or wait until the machine is less busy"
        )


def warn_of_crowd(crowd: Crowd, steps: Sequence[Step]) -> None:
    """Give a Python warning if the steps of an iteration show that the machine is crowded; once per process."""
    if Crowd.has_warned or not steps:
        return
    sentence = crowd.note(steps[0].timing.target, torch.get_num_threads())
    if sentence is not None:
        Crowd.has_warned = True
        warnings.warn(CrowdedWarning(sentence), stacklevel=2)
