"""Prompts that measurements use: read from a file, cut to what fits, chosen evenly over their categories."""

import json
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

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
    """Id, category and prompt of every line; turns become chat messages, the user first.

    Raises:
        InputError: The file cannot be read, or a line is not such an object.
    """
    found: list[tuple[str, str, Prompt]] = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            given = json.loads(line)
            if "turns" in given:
                roles = ("user", "assistant")
                prompt: Prompt = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(given["turns"])]
            else:
                prompt = given["prompt"]
            found.append((given["id"], given["category"], prompt))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; give a file of JSON lines") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} must have an object with id, category, and prompt or turns on every line: {error!r}"
        ) from error
    return found


def choose(questions: Sequence[Question], count: int, seed: int = 0) -> list[Question]:
    """As many prompts of every category as of any other; where one has too few, the others fill up.

    Which prompts of a category are taken depends on the seed and the file alone.
    """
    piles: dict[str, list[Question]] = defaultdict(list)
    for question in questions:
        piles[question.category].append(question)
    for category, pile in piles.items():
        random.Random(f"{seed}/{category}").shuffle(pile)
    chosen: list[Question] = []
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
