"""A configuration that takes part in a measurement: a name, and options of a setup."""

import itertools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.core.inputs import InputError, parse_json, shown, text_of, unknown
from outrider.setup import Setup

FIELDS = ("drafter", "tree", "verifier", "length", "decoding", "allow_lossy", "forward")
"""Options in which configurations may differ. All others are the same for all of them."""
PLAIN = "plain (no drafting)"
"""The name of plain decoding, which always takes part."""
RANGE = re.compile(r"(\d+)\.\.(\d+)")
LARGEST_GRID = 1000
"""Most configurations of a sweep."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A name, and the options in which it differs from the base setup.

    Attributes:
        swept: Whether it is a point of a grid; a point whose parts do not fit is left out instead of refused.
    """

    name: str
    options: Mapping[str, Any]
    swept: bool = False

    def setup(self, base: Setup) -> Setup:
        """The setup that it stands for."""
        return replace(base, **self.options)


DEFAULT = Configuration(name="default", options={})
"""The base setup itself."""


def parse_configuration(text: str) -> Configuration:
    """The configuration of `option=value,option=value`. A value may hold commas and equal signs of its own.

    Raises:
        InputError: It does not begin with an option, or names one twice.

    Example:
        >>> parse_configuration("drafter=suffix:min_match=2,max_nodes=8,length=fixed:4").options
        {'drafter': 'suffix:min_match=2,max_nodes=8', 'length': 'fixed:4'}
    """
    options: dict[str, Any] = {}
    last = ""
    for part in text.split(","):
        key, equals, value = part.partition("=")
        key = key.strip()
        if equals and key in (*FIELDS, "name"):
            if key in options:
                raise InputError(f"--with {shown(text)} gives {key} twice")
            options[key], last = value.strip(), key
        elif last:
            options[last] += f",{part}"
        else:
            raise unknown("option of a configuration", key, (*FIELDS, "name"))
    return named(options.pop("name", text.strip()), options)


def named(name: str, options: Mapping[str, Any], *, swept: bool = False) -> Configuration:
    """A configuration whose options are checked."""
    for key in options:
        if key not in FIELDS:
            raise unknown("option of a configuration", key, FIELDS)
    checked = dict(options)
    if isinstance(checked.get("allow_lossy"), str):
        words = {"true": True, "false": False}
        if checked["allow_lossy"].lower() not in words:
            raise InputError(f"allow_lossy must be true or false, got {shown(checked['allow_lossy'])}")
        checked["allow_lossy"] = words[checked["allow_lossy"].lower()]
    Setup.of(checked)
    if not name or name == PLAIN or "|" in name:
        raise InputError(f"a configuration's name must be a text without | and not {PLAIN!r}, got {shown(name)}")
    return Configuration(name=name, options=checked, swept=swept)


def read_configurations(file: Path) -> list[Configuration]:
    """The configurations of a TOML or JSON file: a table of options for each name.

    Raises:
        InputError: The file cannot be read, or holds something else.
    """
    text = text_of(file, "configuration", "a TOML or JSON file with a table of options for each name")
    try:
        content = parse_json(text, str(file)) if file.suffix == ".json" else tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{file} is not TOML: {error}") from error
    tables = isinstance(content, dict) and content and all(isinstance(each, dict) for each in content.values())
    if not tables:
        raise InputError(f'{file} must hold a table of options for each name, such as [short] and length = "fixed:2"')
    try:
        return [named(name, options) for name, options in content.items()]
    except InputError as error:
        raise InputError(f"{file}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One option of a sweep, and its values."""

    option: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Axis":
        """The axis of `option=value|value`, in which `1..8` stands for 1, 2, ... 8.

        Example:
            >>> Axis.parse("length=fixed:1..3|goodput").values
            ('fixed:1', 'fixed:2', 'fixed:3', 'goodput')
        """
        option, equals, values = text.partition("=")
        option = option.strip()
        if option not in FIELDS:
            raise unknown("option of a sweep", option, FIELDS)
        expanded = [each for value in values.split("|") for each in spread_out(value.strip())]
        if not equals or not all(expanded):
            raise InputError(f"--sweep {shown(text)} names no value; write it as in length=fixed:1..8|goodput")
        return cls(option=option, values=tuple(dict.fromkeys(expanded)))


def spread_out(value: str) -> list[str]:
    """A value for each number of its first range."""
    match = RANGE.search(value)
    if match is None:
        return [value]
    first, last = int(match[1]), int(match[2])
    if last < first or last - first >= LARGEST_GRID:
        raise InputError(f"a range must ascend, by at most {LARGEST_GRID} values, got {match[0]}")
    each = [f"{value[: match.start()]}{number}{value[match.end() :]}" for number in range(first, last + 1)]
    return [text for one in each for text in spread_out(one)]


def point(values: Mapping[str, str]) -> Configuration:
    """The configuration of one value for each axis; its name is its key when results are merged."""
    return named(",".join(f"{option}={value}" for option, value in values.items()), values, swept=True)


def grid(axes: Sequence[Axis]) -> list[Configuration]:
    """A configuration for every combination of the axes' values."""
    options = [axis.option for axis in axes]
    if len(set(options)) < len(options):
        raise InputError("a sweep names one option twice; give all its values together, with | between them")
    combinations = list(itertools.product(*(axis.values for axis in axes)))
    if len(combinations) > LARGEST_GRID:
        raise InputError(f"a sweep has at most {LARGEST_GRID} configurations, got {len(combinations)}")
    return [point(dict(zip(options, values, strict=True))) for values in combinations]
