"""When requests come: as many at once as are wanted, at a rate, or as a trace says."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.bench.workloads.conversation import Conversation
from outrider.core.inputs import InputError
from outrider.core.option import CheckedOptions, option


@dataclass(frozen=True, kw_only=True)
class ClosedLoop(CheckedOptions):
    """So many conversations at once: when one ends, the next begins."""

    concurrency: int = option(1, least=1)

    @property
    def name(self) -> str:
        """Unique among the loads of a measurement."""
        return f"concurrency {self.concurrency}"

    def times(self, conversations: Sequence[Conversation]) -> list[float] | None:
        """None: a conversation begins when another ends."""
        return None


@dataclass(frozen=True, kw_only=True)
class OpenLoop(CheckedOptions):
    """So many conversations per second, whether the engine keeps up or not; gaps are exponential (Poisson)."""

    rate: float = option(above=0, note=" conversations per second")
    seed: int = 0

    @property
    def name(self) -> str:
        """Unique among the loads of a measurement."""
        return f"{self.rate:g} per second"

    def times(self, conversations: Sequence[Conversation]) -> list[float] | None:
        """When each conversation begins, in seconds; the first at 0."""
        gaps = np.random.default_rng(self.seed).exponential(1 / self.rate, max(0, len(conversations) - 1))
        return [0.0, *np.cumsum(gaps).tolist()]


@dataclass(frozen=True, kw_only=True)
class Trace(CheckedOptions):
    """As the workload says.

    Attributes:
        speed: How many times as fast as it says.
    """

    speed: float = option(1.0, above=0)

    @property
    def name(self) -> str:
        """Unique among the loads of a measurement."""
        return "trace" if self.speed == 1 else f"trace, {self.speed:g} times as fast"

    def times(self, conversations: Sequence[Conversation]) -> list[float] | None:
        """When each conversation begins, in seconds; the first at 0."""
        arrivals = [each.arrives for each in conversations]
        known = [each for each in arrivals if each is not None]
        if not known or len(known) < len(arrivals):
            raise InputError("this workload has no arrival times; leave out --trace, or give a trace")
        return [(each - min(known)) / self.speed for each in known]


Load = ClosedLoop | OpenLoop | Trace
