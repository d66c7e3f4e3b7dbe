"""Prompts that recipes measure with: read from a file, left out where too long, chosen evenly over their categories."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.bench.workloads.choice import choose
from outrider.bench.workloads.workload import read_workload
from outrider.core.types import InputError
from outrider.engine.prompts import Prompt


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
