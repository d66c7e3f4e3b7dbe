"""Engines over the tiny pair that decode by PEARL, and models that take time or fail."""

from dataclasses import replace

from outrider.core.types import Sampling
from outrider.decoding.pearl import PearlDecoding
from outrider.engine.engine import Engine
from outrider.lm.tabular import TabularLM, random_rows
from tests.world.models import engine

CLOCKS = ("real", "simulated")
SIMULATED = PearlDecoding(clock="simulated")
GREEDY = Sampling(temperature=0.0, seed=0)
DRAWN = Sampling(temperature=1.0, seed=0)
PROMPT = [3, 9, 4, 30, 9, 4]


def pearl(drafter: str = "model", verifier: str = "token", clock: str = "real", **others: object) -> Engine:
    """An engine over the tiny pair that drafts and verifies at once."""
    plain = engine(drafter, verifier, **others)
    parts = replace(plain.parts, decoding=PearlDecoding(clock=clock))
    return Engine(parts, max_slots=plain.max_slots, eos_ids=plain.eos_ids)


class TickingLM(TabularLM):
    """Tables whose every forward takes some ticks of a clock."""

    def __init__(self, seed: int, ticks: float, clock: list[float]) -> None:
        super().__init__(random_rows(3, seed), 3)
        self._ticks, self._clock = ticks, clock

    def extend(self, segments, taps=()):
        self._clock[0] += self._ticks
        return super().extend(segments, taps)


class Broken(Exception):
    """What a model raises in these tests."""
