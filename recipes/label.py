"""What takes turns where a name and a value say all of it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Label:
    """A way or a job.

    Attributes:
        name: Unique among those that take turns.
        value: What it stands for.
    """

    name: str
    value: Any = None

    @classmethod
    def each(cls, values: Iterable[Any], form: str = "{}") -> "list[Label]":
        """A label for each value, whose name is written as `form` says.

        Example:
            >>> Label.each([1, 8], "{} at once")[1]
            Label(name='8 at once', value=8)
        """
        return [cls(name=form.format(value), value=value) for value in values]
