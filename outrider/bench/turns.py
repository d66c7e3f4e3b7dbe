"""Methods take turns on the same jobs, so that a machine that slows down affects all methods alike."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable


@runtime_checkable
class Named(Protocol):
    """Anything with a name, such as a method or a prompt."""

    @property
    def name(self) -> str:
        """Unique among its kind in a measurement."""
        ...


W = TypeVar("W", bound=Named)
J = TypeVar("J", bound=Named)


@dataclass(frozen=True, kw_only=True)
class Turn(Generic[W, J]):
    """One run: a way does a job, for the `round`-th time."""

    round: int
    way: W
    job: J

    @property
    def name(self) -> str:
        """Unique within a phase of a measurement."""
        return f"{self.way.name} | {self.job.name} | {self.round}"


def turns(ways: Sequence[W], jobs: Sequence[J], *, rounds: int = 1, seed: int | str = 0) -> Iterator[Turn[W, J]]:
    """Every method does every job in every round; the order of jobs and methods is shuffled each time.

    All methods do one job before any does the next, so that compared runs are close in time.

    Example:
        >>> from types import SimpleNamespace as Thing
        >>> ways, jobs = ([Thing(name=name) for name in names] for names in ("ab", "xyz"))
        >>> len(list(turns(ways, jobs, rounds=2)))
        12
    """
    for things, what in ((ways, "ways"), (jobs, "jobs")):
        if len({thing.name for thing in things}) < len(things):
            raise ValueError(f"two {what} have one name")
    sample = random.Random(seed).sample
    for round_ in range(rounds):
        for job in sample(list(jobs), len(jobs)):
            for way in sample(list(ways), len(ways)):
                yield Turn(round=round_, way=way, job=job)
