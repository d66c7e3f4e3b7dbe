"""Costs of steps that no clock measures: what a test asserts must not depend on how fast a machine was."""

from collections.abc import Iterator
from contextlib import contextmanager

from outrider.lengths.costs import CostTable
from outrider.lengths.experience import Experience
from outrider.lm import choice
from outrider.plan import table

_MEASURE, _RECALLED, _CROWDED = table.measure, Experience.recalled, choice.crowded


def made_up(requests: int, length: int) -> float:
    """Seconds of a step: each draft token costs 15 % of a plain step of one request, and more in a batch."""
    return 0.01 * (1 + 0.04 * (requests - 1)) * (1 + length * (0.12 + 0.03 * requests))


def stop() -> None:
    """From now on no steps are timed at loading, and engines remember no acceptance of earlier ones. Forwards of a
    model are timed once: what was measured counts, whatever else runs on the machine.
    """
    table.measure = lambda parts, **options: CostTable.of_formula(made_up)
    Experience.recalled = classmethod(lambda cls, costs, key: cls(costs))
    choice.crowded = lambda seen, threads: False


@contextmanager
def running() -> Iterator[None]:
    """Within this context steps are timed at loading, and acceptance is remembered, as users have it."""
    table.measure, Experience.recalled, choice.crowded = _MEASURE, _RECALLED, _CROWDED
    try:
        yield
    finally:
        stop()
