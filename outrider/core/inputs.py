"""Input from people: the error for wrong input, checks of numbers, reading fields and files. Imports nothing heavy."""

import contextlib
import dataclasses
import difflib
import math
import numbers
import operator
import os
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Literal


class InputError(ValueError):
    """Wrong input from a person. The message says what was given, what is allowed, and what to do."""


def unknown(what: str, given: str, known: Iterable[str]) -> InputError:
    """The error for an unknown name. It lists the known names and suggests a similar one.

    Example:
        >>> print(unknown("drafter", "ngrm", ["ngram", "suffix"]))
        unknown drafter 'ngrm'; did you mean 'ngram'? Available: ngram, suffix
    """
    names = list(known)
    close = difflib.get_close_matches(given, names, n=1)
    guess = f"; did you mean {close[0]!r}?" if close else "."
    return InputError(f"unknown {what} {given!r}{guess} Available: {', '.join(names) or 'no fields'}")


def whole(name: str, value: object) -> int:
    """A whole number of any integer type, such as NumPy's, as an int. Raises InputError for other values.

    Example:
        >>> whole("max_new_tokens", 4.5)
        Traceback (most recent call last):
        ...
        outrider.core.inputs.InputError: max_new_tokens must be a whole number, got 4.5
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise InputError(f"{name} must be a whole number, got {value!r}")


def number(name: str, value: object) -> float:
    """A number of any real type, such as NumPy's, as an int or a float. Raises InputError for other values.

    Example:
        >>> number("temperature", "1")
        Traceback (most recent call last):
        ...
        outrider.core.inputs.InputError: temperature must be a number, got '1'
    """
    if isinstance(value, int | numbers.Real) and not isinstance(value, bool):
        return value if isinstance(value, int) else float(value)
    raise InputError(f"{name} must be a number, got {value!r}")


def text_of(file: Path, what: str, wanted: str) -> str:
    """The text of a file that a person named.

    Args:
        what: What the file holds.
        wanted: What to give instead, for the error message.

    Raises:
        InputError: There is no such file, or it cannot be read.
    """
    if not os.path.isfile(file):
        raise InputError(f"there is no {what} file {file}; give {wanted}")
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}") from error


def field_values(what: str, kind: type, text: str, *, first: bool = False) -> dict[str, object]:
    """The fields of a dataclass in `key=value,key=value`.

    Args:
        what: The thing that the fields are of, for error messages.
        first: Whether a first value without a key sets the first field.

    Raises:
        InputError: Unknown field, or a value that is not of the field's type; lists the real ones.
    """
    fields = [
        field.name for field in dataclasses.fields(kind) if not field.name.startswith("_") and field.name != "spec"
    ]
    hints, values = typing.get_type_hints(kind), dict[str, object]()
    for i, item in enumerate(filter(None, text.split(","))):
        key, equals, value = item.partition("=")
        if not equals and i == 0 and first and fields:
            key, value = fields[0], item
        if key not in fields:
            raise unknown(f"{what} field", key, fields)
        values[key] = field_value(f"{what} field {key!r}", value, hints[key])
    return values


def field_value(what: str, text: str, hint: object) -> object:
    """A field's value, read by its type: an int, float, bool, string, one of given words, or a list of ints 4x2x2.

    Args:
        what: The field, for the error message.
        hint: Its type.

    Raises:
        InputError: The text is of no such type.

    Example:
        >>> field_value("taps", "2x4", tuple[int, ...] | None), field_value("width", "3", int)
        ((2, 4), 3)
    """
    if typing.get_origin(hint) is Literal:
        if text in typing.get_args(hint):
            return text
        raise unknown(what, text, typing.get_args(hint))
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for kind in options:
        with contextlib.suppress(ValueError):
            return _read(kind, text)
    wanted = " or ".join(_name(kind) for kind in options)
    raise InputError(f"{what} must be {wanted}, got {text!r}")


def _read(kind: object, text: str) -> object:
    """A value of one type. Raises ValueError if the text is of another."""
    if kind is type(None) or kind is bool:
        words = {"none": None} if kind is type(None) else {"true": True, "false": False}
        if text.lower() in words:
            return words[text.lower()]
    elif typing.get_origin(kind) is tuple:
        if all(part.isdecimal() for part in text.split("x")):
            return tuple(int(part) for part in text.split("x"))
    elif isinstance(kind, type):
        value = kind(text)
        if not isinstance(value, float) or math.isfinite(value):
            return value
    raise ValueError(text)


def _name(kind: object) -> str:
    """What a field's type is called."""
    if kind is type(None):
        return "none"
    if typing.get_origin(kind) is tuple:
        return "whole numbers joined by x, as in 4x2x2"
    return getattr(kind, "__name__", str(kind))
