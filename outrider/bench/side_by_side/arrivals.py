"""When requests come: as many at once as are wanted, at a rate, or as a trace says."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.bench.workloads.conversation import Conversation
from outrider.core.inputs import InputError


@dataclass(frozen=True, kw_only=True)
class ClosedLoop:
    """So many conversations at once: when one ends, the next begins."""

    concurrency: int = 1

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise InputError(f"concurrency must be >= 1, got {self.concurrency}")

    @property
    def name(self) -> str:
        """Unique among the loads of a measurement."""
        return f"concurrency {self.concurrency}"

    def times(self, conversations: Sequence[Conversation]) -> list[float] | None:
        """None: a conversation begins when another ends."""
        return None


@dataclass(frozen=True, kw_only=True)
class OpenLoop:
    """So many conversations per second, whether the engine keeps up or not; gaps are exponential (Poisson)."""

    rate: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.rate < float("inf"):
            raise InputError(f"rate must be > 0 conversations per second, got {self.rate:g}")

    @property
    def name(self) -> str:
        """Unique among the loads of a measurement."""
        return f"{self.rate:g} per second"

    def times(self, conversations: Sequence[Conversation]) -> list[float] | None:
        """When each conversation begins, in seconds; the first at 0."""
        gaps = np.random.default_rng(self.seed).exponential(1 / self.rate, max(0, len(conversations) - 1))
        return [0.0, *np.cumsum(gaps).tolist()]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """As the workload says.

    Attributes:
        speed: How many times as fast as it says.
    """

    speed: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.speed < float("inf"):
            raise InputError(f"the speed of a trace must be > 0, got {self.speed:g}")

    @property
    def name(self) -> str:
        """Unique among the loads of a measurement."""
        return "trace" if self.speed == 1 else f"trace, {self.speed:g} times as fast"

    def times(self, conversations: Sequence[Conversation]) -> list[float] | None:
        """When each conversation begins, in seconds; the first at 0."""
        given = [each.arrives for each in conversations]
        known = [each for each in given if each is not None]
        if not known or len(known) < len(given):
            raise InputError("this workload has no arrival times; leave out --trace, or give a trace")
        return [(each - min(known)) / self.speed for each in known]


Load = ClosedLoop | OpenLoop | Trace
