"""One record of a workload's file, whose fields are checked as they are read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.core.inputs import InputError, shown


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """An object of a file, and where it stands there.

    Attributes:
        place: File and line, for messages.
        number: Its number in the file, from 0.

    Example:
        >>> FileRecord(place="a.jsonl, line 3", number=2, fields={"prompt": 7}).text("prompt")
        Traceback (most recent call last):
        ...
        outrider.core.inputs.InputError: a.jsonl, line 3: 'prompt' must be a text, got 7
    """

    place: str
    number: int
    fields: Mapping[str, Any]

    def has(self, *names: str) -> bool:
        """Whether all these fields are there, and are not null."""
        return all(self.fields.get(name) is not None for name in names)

    def wrong(self, name: str, wanted: str) -> InputError:
        """The error for a field that is missing or of the wrong kind."""
        if self.fields.get(name) is None:
            return InputError(f"{self.place}: {name!r} is missing; it must be {wanted}")
        return InputError(f"{self.place}: {name!r} must be {wanted}, got {shown(self.fields[name])}")

    def text(self, name: str) -> str:
        """A text that is not empty."""
        value = self.fields.get(name)
        if not isinstance(value, str) or not value:
            raise self.wrong(name, "a text")
        return value

    def count(self, name: str) -> int:
        """A whole number of at least 1."""
        value = self.fields.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(name, "a whole number >= 1")
        return value

    def time(self, name: str) -> float:
        """A number of at least 0."""
        value = self.fields.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
            raise self.wrong(name, "a number >= 0")
        return float(value)

    def id(self, *names: str) -> str:
        """The first of these fields that is there, as a text; otherwise the record's number."""
        value = next((self.fields[name] for name in names if self.has(name)), self.number)
        return str(value)

    def category(self, usual: str) -> str:
        """Its category, or the usual one."""
        return self.text("category") if self.has("category") else usual
