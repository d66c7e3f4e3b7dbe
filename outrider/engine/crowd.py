"""Crowded machines: steps are many times slower if torch has more threads than there are free cores.

Torch's threads wait for each other by spinning. If one of them has no core, the others spin until it gets one.
"""

import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from outrider.core.types import Step
from outrider.host.cores import CoreUsage, Shares, shares

SLOWER = 5.0
"""How many times slower than before steps must be."""
LATEST = 8
"""How many of the latest steps are compared with earlier ones."""
MIN_STEPS = 8
"""Fewest earlier steps of a kind that say how long such a step takes."""
USUAL = 128
"""Most earlier steps of a kind that are remembered."""
SPAN = 0.5
"""For how many seconds of steps the cores are watched."""
MARGIN = 0.25
"""By how much the threads must outnumber the free cores where steps have become slower."""
FIRST_MARGIN = 0.5
"""By how much at the first steps, which cannot be compared with earlier ones."""


class CrowdedWarning(RuntimeWarning):
    """Torch has more threads than there are free cores."""


@dataclass(kw_only=True)
class _Earlier:
    """Earlier steps of a kind. Changes in place.

    Attributes:
        seconds: What they took.
        usual: Their median; it is worked out anew every few steps, because that takes longer than all else here.
        age: Steps since then.
    """

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=USUAL))
    usual: float = 0.0
    age: int = LATEST

    def compared(self, seconds: float) -> float:
        """How many times as long as usual a step took."""
        if self.age == LATEST:
            self.usual, self.age = max(sorted(self.seconds)[len(self.seconds) // 2], 1e-9), 0
        self.age += 1
        return seconds / self.usual


class Pace:
    """Compares steps with earlier steps of the same kind. Changes in place.

    Steps are of one kind if they are for as many requests, and their numbers of nodes have as many binary digits. So
    a longer draft or a larger batch is not mistaken for a slower machine.
    """

    def __init__(self) -> None:
        self._earlier: dict[tuple[int, int], _Earlier] = {}
        self._latest: deque[float] = deque(maxlen=LATEST)

    def note(self, requests: int, nodes: int, seconds: float) -> float:
        """Note a step. Returns how many times as long as before steps take now: the median of the latest steps, each
        compared with the median of earlier steps of its kind. 1 until that is known.

        Args:
            requests: Number of requests in the step.
            nodes: Number of nodes that the target ran on.
            seconds: Time of the target's forward.
        """
        kind = (requests, nodes.bit_length())
        if (earlier := self._earlier.get(kind)) is None:
            earlier = self._earlier[kind] = _Earlier()
        if len(earlier.seconds) >= MIN_STEPS:
            self._latest.append(earlier.compared(seconds))
        earlier.seconds.append(seconds)
        return sorted(self._latest)[LATEST // 2] if len(self._latest) == LATEST else 1.0


class Crowd:
    """Notices that other processes take cores from torch's threads. Changes in place.

    The cores are watched at the first steps, and whenever steps have become many times slower. Fewer free cores than
    threads are a crowd. At the first steps no core may be idle besides, because nothing shows yet that steps are slow.

    Args:
        look: Returns what the cores have done up to now.
    """

    has_warned: ClassVar[bool] = False
    """Whether a warning was given in this process."""

    def __init__(self, look: Callable[[], CoreUsage] = CoreUsage.now) -> None:
        self._look = look
        self._pace = Pace()
        self._before: CoreUsage | None = None
        self._watched = 0.0
        self._first = True

    def note(self, *, requests: int, nodes: int, seconds: float, threads: int) -> str | None:
        """Note a step. Returns a sentence for the user if the machine is crowded; otherwise None.

        Args:
            requests: Number of requests in the step.
            nodes: Number of nodes that the target ran on.
            seconds: Time of the target's forward.
            threads: Number of torch's threads. A single thread waits for no other, so it is never too many.
        """
        slower = self._pace.note(requests, nodes, seconds)
        if threads == 1 or not (self._first or slower >= SLOWER):
            self._before = None
            return None
        seen = self._seen(seconds)
        if seen is None:
            return None
        first, self._first = self._first, False
        idle_cores = seen.free - seen.of_process
        if threads <= seen.free + (FIRST_MARGIN if first else MARGIN) or (first and idle_cores > MARGIN):
            return None
        return _sentence(None if first else slower, threads, seen.free)

    def _seen(self, seconds: float) -> Shares | None:
        """Watch the cores, and return who used them once the watched steps are long enough."""
        if self._before is None:
            self._before, self._watched = self._look(), 0.0
            return None
        self._watched += seconds
        if self._watched < SPAN:
            return None
        before, self._before = self._before, None
        return shares(before, self._look())


def warn_of_crowd(crowd: Crowd, steps: Sequence[Step]) -> None:
    """Give a Python warning if the steps of an iteration show that the machine is crowded; once per process."""
    if Crowd.has_warned or not steps:
        return
    sentence = crowd.note(
        requests=len(steps),
        nodes=len(steps) + sum([step.num_draft_tokens for step in steps]),
        seconds=steps[0].timing.target,
        threads=torch.get_num_threads(),
    )
    if sentence is not None:
        Crowd.has_warned = True
        warnings.warn(CrowdedWarning(sentence), stacklevel=2)


def _sentence(slower: float | None, threads: int, free: float) -> str:
    """What the user should know and do.

    Args:
        slower: How many times as long as before steps take; None if it is not known.
    """
    cause = f"torch has {threads} threads, and other processes leave only {free:.1f} cores free for them"
    problem = f"{cause}, which can make steps many times slower"
    if slower is not None:
        problem = f"steps take {slower:.0f} times as long as before: {cause}"
    fewer = max(1, min(int(free), threads - 1))
    return (
        f"{problem}; use fewer threads (threads={fewer} in Python, --threads {fewer} on the command line), or wait "
        "until the machine is less busy"
    )
