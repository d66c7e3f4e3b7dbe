"""Which prompts of a workload are asked: as many of every category as of any other."""

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol, TypeVar, runtime_checkable


@runtime_checkable
class Categorised(Protocol):
    """Anything with a category."""

    @property
    def category(self) -> str:
        """As many things of each category are chosen as of any other."""
        ...


C = TypeVar("C", bound=Categorised)


def choose(prompts: Sequence[C], count: int, seed: int = 0) -> list[C]:
    """As many prompts of every category as of any other; where one has too few, the others fill up.

    Which prompts of a category are taken depends on the seed and the file alone.
    """
    piles: dict[str, list[C]] = defaultdict(list)
    for prompt in prompts:
        piles[prompt.category].append(prompt)
    for category, pile in piles.items():
        random.Random(f"{seed}/{category}").shuffle(pile)
    chosen: list[C] = []
    while len(chosen) < count and any(piles.values()):
        for category in sorted(piles):
            if piles[category] and len(chosen) < count:
                chosen.append(piles[category].pop(0))
    return chosen
