"""Crowded machines: steps are many times slower if torch has more threads than there are free cores.

Torch's threads wait for each other by spinning. If one of them has no core, the others spin until it gets one.
"""

import functools
import warnings

import torch

from outrider.host.cores import BEGAN, CoreUsage, crowded, shares
from outrider.host.threads import threads_are_bound

SPAN = 0.5
"""For how many seconds the cores must have been watched."""


class CrowdedWarning(RuntimeWarning):
    """Torch has more threads than there are free cores."""


def crowd_between(before: CoreUsage, after: CoreUsage, threads: int) -> str | None:
    """A sentence for the user if other processes left too few cores for torch's threads; otherwise None.

    Args:
        threads: Number of torch's threads. A single thread waits for no other, so it is never too many.
    """
    seen = shares(before, after)
    if threads == 1 or after.seconds - before.seconds < SPAN or seen is None or not crowded(seen, threads):
        return None
    fewer = max(1, min(int(seen.free), threads - 1))
    return (
        f"torch has {threads} threads, and other processes leave only {seen.free:.1f} cores free for them, which can "
        f"make steps many times slower; use fewer threads (threads={fewer} in Python, --threads {fewer} on the command "
        "line), or wait until the machine is less busy"
    )


@functools.cache
def warn_of_crowd() -> None:
    """Give a Python warning if the machine was crowded while libraries and models were read; once per process."""
    if threads_are_bound():
        return
    if (sentence := crowd_between(BEGAN, CoreUsage.now(), torch.get_num_threads())) is not None:
        warnings.warn(CrowdedWarning(sentence), stacklevel=2)
