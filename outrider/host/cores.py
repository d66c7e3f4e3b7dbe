"""CPU cores: how many this process may use, and how many of them other processes leave free."""

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

CROWDED = 0.5
"""Cores that other processes may take from the threads of a measurement that is remembered."""
ROOT = Path("/")
"""Where `/proc` and `/sys` are."""


def usable_cores(root: Path = ROOT) -> int:
    """How many cores this process may use: those of its CPU affinity, or fewer by a quota of its control groups."""
    return max(1, math.floor(min(len(affinity()), quota(root))))


def affinity() -> set[int]:
    """The numbers of the CPUs on which this process may run. Systems other than Linux allow all."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def quota(root: Path = ROOT) -> float:
    """How many cores' worth of time the control groups allow this process; infinite if they set no limit.

    A group's limit also holds for the groups inside it. In a container, `/proc` may name groups that only the host can
    see; the container's own group is then the top of `/sys/fs/cgroup`.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return math.inf
    limits = [math.inf]
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
            group_folder = top / place.lstrip("/")
            limits += [_limit(group) for group in (group_folder, *group_folder.parents) if group.is_relative_to(top)]
    return min(limits)


def _limit(group: Path) -> float:
    """The limit of one control group, of version 2 or 1."""
    try:
        if (group / "cpu.max").exists():
            share, period = (group / "cpu.max").read_text().split()
        else:
            share, period = ((group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return math.inf if share in ("max", "-1") else int(share) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf


@dataclass(frozen=True, kw_only=True)
class CoreUsage:
    """What the cores had done by a moment.

    Attributes:
        seconds: The moment, in seconds since some other one.
        of_process: CPU seconds of this process.
        busy: CPU seconds of all processes, on the cores of this process's affinity; None if the system does not say.
        load: How many threads wanted a core, on average over the last minute; None if the system does not say.
    """

    seconds: float
    of_process: float
    busy: float | None = None
    load: float | None = None

    @classmethod
    def now(cls, root: Path = ROOT) -> "CoreUsage":
        """The usage up to now."""
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        return cls(seconds=time.monotonic(), of_process=time.process_time(), busy=_busy(root), load=load)


@dataclass(frozen=True, kw_only=True)
class Shares:
    """How many cores were used between two moments, and by whom.

    Attributes:
        of_process: Cores that this process used.
        free: Cores that this process could use: those that other processes left free.
    """

    of_process: float
    free: float


def shares(before: CoreUsage, after: CoreUsage) -> Shares | None:
    """The cores' use between two moments; None if the system does not say what other processes used.

    Other processes used what all processes used, less this one's share. Without that number, the load average says how
    many threads wanted a core.
    """
    wall = max(after.seconds - before.seconds, 1e-9)
    of_process = (after.of_process - before.of_process) / wall
    if before.busy is not None and after.busy is not None:
        others = (after.busy - before.busy) / wall - of_process
    elif after.load is not None:
        others = after.load - of_process
    else:
        return None
    return Shares(of_process=of_process, free=max(0.0, min(usable_cores(), len(affinity()) - max(0.0, others))))


def crowded(seen: Shares | None, threads: int) -> bool:
    """Whether other processes took so much of the cores that times say little. False if the system does not say.

    Example:
        >>> crowded(Shares(of_process=1.0, free=1.2), threads=2), crowded(Shares(of_process=1.9, free=2.0), threads=2)
        (True, False)
    """
    return seen is not None and seen.free < threads - CROWDED


def _busy(root: Path) -> float | None:
    """The CPU seconds in `/proc/stat`. The time of other virtual machines on the same core counts as busy."""
    try:
        lines = [line.split() for line in (root / "proc/stat").read_text().splitlines()]
        ticks = {line[0]: [int(word) for word in line[1:9]] for line in lines if line[:1] and line[0].startswith("cpu")}
        per_core = [ticks[f"cpu{number}"] for number in affinity()]
        # user, nice, system, idle, iowait, irq, softirq, steal
        worked = sum(sum(each) - each[3] - each[4] for each in per_core)
    except (OSError, ValueError, KeyError, IndexError):
        return None
    return worked / os.sysconf("SC_CLK_TCK") if worked else None


BEGAN = CoreUsage.now()
"""Use of the cores when this module was imported, before any model was read."""
