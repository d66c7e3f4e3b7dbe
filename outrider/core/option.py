"""An option: a field of a dataclass that says what values it takes; they are checked in one place. Imports nothing
heavy.
"""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Any

from outrider.core.inputs import InputError, number, shown, whole

KEY = "option"
"""Where a field's metadata has its `Bounds`."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What values an option takes, and where it stands in the help.

    Attributes:
        least: The smallest value.
        above: What the value is above.
        most: The largest value.
        below: What the value is below.
        among: All values; none: any.
        finite: Whether a number must be finite.
        note: What a message adds to the rule, such as ` (0 means greedy)`.
        heading: Heading in the help of the command line; None: that of the dataclass.
        kind: What else a room distinguishes its options by.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    among: Sequence[Any] = ()
    finite: bool = True
    note: str = ""
    heading: str | None = None
    kind: str | None = None

    def check(self, name: str, value: Any) -> None:
        """Raise InputError for a value out of bounds. None is in all of them.

        Example:
            >>> Bounds(above=0, most=1).check("top_p", 1.5)
            Traceback (most recent call last):
            ...
            outrider.core.inputs.InputError: top_p must be in (0, 1], got 1.5
        """
        if value is not None and self.among and value not in self.among:
            raise InputError(f"{name} must be one of {', '.join(map(str, self.among))}, got {shown(value)}")
        if not isinstance(value, int | float):
            return
        fine = (
            (math.isfinite(value) or (value > 0 and not self.finite))
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )
        if not fine:
            raise InputError(f"{name} must be {self._rule}{self.note}, got {value}")

    @property
    def _rule(self) -> str:
        """The bounds in words."""
        low = self.least if self.above is None else self.above
        high = self.most if self.below is None else self.below
        if low is not None and high is not None:
            begin, end = "[" if self.above is None else "(", "]" if self.below is None else ")"
            return f"in {begin}{low}, {high}{end}"
        if low is not None:
            return f">{'=' if self.above is None else ''} {low}"
        return "finite" if high is None else f"<{'=' if self.below is None else ''} {high}"


def option(default: Any = MISSING, *, default_factory: Callable[[], Any] | None = None, **bounds: Any) -> Any:
    """A field with bounds. Its dataclass is a `CheckedOptions`, or calls `check`.

    Args:
        default_factory: As of `dataclasses.field`.
        bounds: The fields of `Bounds`.

    Example:
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Setting(CheckedOptions):
        ...     temperature: float = option(1.0, least=0, note=" (0 means greedy)")
        >>> Setting(temperature=-1)
        Traceback (most recent call last):
        ...
        outrider.core.inputs.InputError: temperature must be >= 0 (0 means greedy), got -1
    """
    defaults = {"default": default} if default_factory is None else {"default_factory": default_factory}
    return dataclasses.field(**defaults, metadata={KEY: Bounds(**bounds)})


@functools.cache
def bounds_of(kind: Any) -> Mapping[str, Bounds]:
    """The bounds of a dataclass's options, by name. A field with another default keeps those of the base class."""
    bounds: dict[str, Bounds] = {}
    for base in reversed(kind.__mro__):
        fields: Mapping[str, dataclasses.Field[Any]] = base.__dict__.get("__dataclass_fields__", {})
        bounds |= {name: field.metadata[KEY] for name, field in fields.items() if KEY in field.metadata}
    return bounds


def check(options: Any, what: Callable[[str], str] = str) -> None:
    """Raise InputError for an option with a value of the wrong kind or out of bounds. NumPy's numbers become Python's.

    Args:
        options: An instance of a dataclass. Its fields without bounds are not looked at.
        what: What a message calls a field.
    """
    # mypy takes no class of dataclasses for hashable.
    options_of: Any = type(options)
    for name, kind, may_lack, bounds in _options_of(options_of):
        value = getattr(options, name)
        if value is None and may_lack:
            continue
        if kind in (int, float):
            read = (whole if kind is int else number)(what(name), value)
            if read is not value:
                object.__setattr__(options, name, read)
            value = read
        bounds.check(what(name), value)


class CheckedOptions:
    """A dataclass whose options are checked when an instance is made."""

    def __post_init__(self) -> None:
        check(self)


@functools.cache
def _options_of(kind: Any) -> list[tuple[str, Any, bool, Bounds]]:
    """Of each option: its name, the type of its values, whether it may be None, and its bounds."""
    hints, options = typing.get_type_hints(kind), []
    for name, bounds in bounds_of(kind).items():
        kinds = typing.get_args(hints[name]) if isinstance(hints[name], types.UnionType) else (hints[name],)
        options.append((name, kinds[0], type(None) in kinds, bounds))
    return options
