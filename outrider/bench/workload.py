"""Prompts that measurements use: read from a file, cut to what fits, chosen evenly over their categories."""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

from outrider.bench.workloads.workload import read_workload
from outrider.core.types import InputError
from outrider.embedded import ASSETS
from outrider.engine.prompts import Prompt

PROMPTS = ASSETS / "prompts.jsonl"
"""The prompts that ship with the package."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A prompt: its name, its category and its token ids."""

    id: str
    category: str
    tokens: tuple[int, ...]

    @property
    def name(self) -> str:
        """The same as its id, as what takes turns is asked for it."""
        return self.id


def read_prompts(path: Path) -> list[tuple[str, str, Prompt]]:
    """Id, category and first prompt of every conversation of a file; `outrider.bench.workloads` has the formats.

    Raises:
        InputError: The file cannot be read, or a line is of another format than the first.
    """
    return [(each.id, each.category, each.opening) for each in read_workload(str(path)).conversations]


@runtime_checkable
class Categorised(Protocol):
    """Anything with a category."""

    @property
    def category(self) -> str:
        """As many things of each category are chosen as of any other."""
        ...


C = TypeVar("C", bound=Categorised)


def choose(questions: Sequence[C], count: int, seed: int = 0) -> list[C]:
    """As many prompts of every category as of any other; where one has too few, the others fill up.

    Which prompts of a category are taken depends on the seed and the file alone.
    """
    piles: dict[str, list[C]] = defaultdict(list)
    for question in questions:
        piles[question.category].append(question)
    for category, pile in piles.items():
        random.Random(f"{seed}/{category}").shuffle(pile)
    chosen: list[C] = []
    while len(chosen) < count and any(piles.values()):
        for category in sorted(piles):
            if piles[category] and len(chosen) < count:
                chosen.append(piles[category].pop(0))
    return chosen


def questions(
    path: Path,
    count: int,
    *,
    encode: Callable[[Prompt], list[int]],
    longest: int,
    without: Sequence[Question] = (),
    seed: int = 0,
) -> list[Question]:
    """Prompts of a file, as many of every category as of any other.

    Args:
        encode: Turns a prompt into token ids.
        longest: Most tokens of a prompt; longer ones are left out.
        without: Prompts that are taken already.

    Raises:
        InputError: The file cannot be read, or it has too few prompts that fit.
    """
    read = [Question(id=i, category=c, tokens=tuple(encode(prompt))) for i, c, prompt in read_prompts(path)]
    taken = {question.id for question in without}
    fitting = [q for q in read if 0 < len(q.tokens) <= longest and q.id not in taken]
    if len(fitting) < count:
        raise InputError(
            f"{path} has {len(fitting)} prompts of at most {longest} tokens left, {count} are needed; "
            "lower --num-prompts or give a longer file with --prompts"
        )
    return choose(fitting, count, seed)
