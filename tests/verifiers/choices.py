"""Where a naive rule's coins and draws come from: given uniforms, or every outcome with its probability."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np

Outcome = TypeVar("Outcome")
Option = TypeVar("Option")


def draw(weights: np.ndarray, uniform: float) -> int:
    """Inverse CDF."""
    reached = 0.0
    for token, weight in enumerate(weights):
        reached += float(weight)
        if uniform * float(weights.sum()) < reached:
            return token
    return int(np.flatnonzero(weights)[-1])


@runtime_checkable
class Choices(Protocol):
    """All the randomness that a rule may use; each slot of each kind is used at most once."""

    def coin(self, probability: float, slot: int) -> bool:
        """Whether an event of this probability happens; 0 never does, 1 always."""
        ...

    def pick(self, weights: np.ndarray, slot: int) -> int:
        """An index in proportion to its weight; the weights need no normalising."""
        ...


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Choices made by given uniforms in [0, 1).

    Example:
        >>> Numbers(accept=lambda slot: 0.0, recover=lambda slot: 0.5).coin(0.0, 3)
        False
    """

    accept: Callable[[int], float]
    recover: Callable[[int], float]

    def coin(self, probability: float, slot: int) -> bool:
        return self.accept(slot) < probability

    def pick(self, weights: np.ndarray, slot: int) -> int:
        return draw(weights, self.recover(slot))


class World:
    """Choices that follow a script, then the first possibility; `others` collects the scripts not taken."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.taken = script, list[int]()
        self.others: list[list[int]] = []
        self.probability = 1.0
        self.used: set[tuple[str, int]] = set()

    def coin(self, probability: float, slot: int) -> bool:
        assert 0 <= probability <= 1 + 1e-12, f"a coin of probability {probability}"
        self._use("accept", slot)
        return self._branch([(True, min(probability, 1.0)), (False, 1 - min(probability, 1.0))])

    def pick(self, weights: np.ndarray, slot: int) -> int:
        assert weights.sum() > 0, f"nothing to draw from: {weights}"
        assert weights.min() >= 0, f"negative weights: {weights}"
        self._use("recover", slot)
        return self._branch(list(enumerate((weights / weights.sum()).tolist())))

    def _use(self, purpose: str, slot: int) -> None:
        assert (purpose, slot) not in self.used, f"{purpose} slot {slot} is used twice"
        self.used.add((purpose, slot))

    def _branch(self, options: list[tuple[Option, float]]) -> Option:
        options = [option for option in options if option[1] > 0]
        if len(self.taken) < len(self.script):
            index = self.script[len(self.taken)]
        else:
            index = 0
            self.others += [[*self.taken, i] for i in range(1, len(options))]
        self.taken.append(index)
        value, probability = options[index]
        self.probability *= probability
        return value


def outcomes(decide: Callable[[Choices], Outcome]) -> dict[Outcome, float]:
    """The exact law of what a random decision returns: it is run once for every way that its choices can fall.

    Example:
        >>> outcomes(lambda dice: dice.coin(0.25, 0) and dice.coin(0.5, 1))
        {True: 0.125, False: 0.875}
    """
    law: dict[Outcome, float] = defaultdict(float)
    scripts: list[list[int]] = [[]]
    while scripts:
        world = World(scripts.pop())
        found = decide(world)
        law[found] += world.probability
        scripts += reversed(world.others)
    return dict(law)
