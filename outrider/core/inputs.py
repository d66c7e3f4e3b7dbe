"""Input from people: the error for wrong input, checks of numbers, reading fields and files. Imports nothing heavy."""

import contextlib
import dataclasses
import difflib
import json
import math
import numbers
import operator
import os
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

LARGEST = 2**64 - 1
"""Largest whole number that anything takes: the largest seed."""
SHOWN = 100
"""Most characters of a value that a message shows."""
REPOSITORY = "https://github.com/outrider-decoding/outrider"


class InputError(ValueError):
    """Wrong input from a person. The message says what was given, what is allowed, and what to do."""


def shown(value: object) -> str:
    """A value as a message shows it: the beginning and the end of a long one.

    Example:
        >>> shown("ngrm"), len(shown("9" * 5000))
        ("'ngrm'", 100)
    """
    try:
        text = repr(value)
    except ValueError:
        # Python writes no whole number of thousands of digits.
        return "a number of thousands of digits"
    half = (SHOWN - 3) // 2
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3 - half]}...{text[-half:]}"


def needs(what: str, library: str, extra: str) -> InputError:
    """The error for a library that is not installed.

    Args:
        what: What needs it.
        extra: The extra of the package that installs it.

    Example:
        >>> print(needs("training", "datasets", "train"))
        training needs datasets; `pip install "outrider[train] @ git+https://github.com/outrider-decoding/outrider"`
        installs it
    """
    return InputError(f'{what} needs {library}; `pip install "outrider[{extra}] @ git+{REPOSITORY}"` installs it')


def parse_json(text: str | bytes, what: str) -> Any:
    """The value of a JSON text. Raises InputError if it is no JSON, or if Python cannot hold it.

    Args:
        what: What the text is, for the message.

    Example:
        >>> parse_json("[1, 2", "line 3")
        Traceback (most recent call last):
        ...
        outrider.core.inputs.InputError: line 3 is not JSON: Expecting ',' delimiter: line 1 column 6 (char 5)
    """
    try:
        return json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{what} is not JSON: {error}") from error
    except RecursionError as error:
        raise InputError(f"{what} cannot be read: its JSON is nested too deeply") from error
    except ValueError as error:
        raise InputError(f"{what} cannot be read: its JSON holds a number of thousands of digits") from error


def unknown(what: str, name: str, known: Iterable[str]) -> InputError:
    """The error for an unknown name. It lists the known names and suggests a similar one.

    Example:
        >>> print(unknown("drafter", "ngrm", ["ngram", "suffix"]))
        unknown drafter 'ngrm'; did you mean 'ngram'? Available: ngram, suffix
    """
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    guess = f"; did you mean {close[0]!r}?" if close else "."
    return InputError(f"unknown {what} {shown(name)}{guess} Available: {', '.join(names) or 'no fields'}")


def whole(name: str, value: object) -> int:
    """A whole number of any integer type, such as NumPy's, as an int. Raises InputError for other values, and for
    numbers of more than 64 bits.

    Example:
        >>> whole("max_new_tokens", 4.5)
        Traceback (most recent call last):
        ...
        outrider.core.inputs.InputError: max_new_tokens must be a whole number, got 4.5
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        raise InputError(f"{name} must be a whole number, got {shown(value)}")
    if abs(number) > LARGEST:
        raise InputError(f"{name} must be {'<= 2**64 - 1' if number > 0 else '> -2**64'}, got {shown(number)}")
    return number


def number(name: str, value: object) -> float:
    """A number of any real type, such as NumPy's, as an int or a float. Raises InputError for other values.

    Example:
        >>> number("temperature", "1")
        Traceback (most recent call last):
        ...
        outrider.core.inputs.InputError: temperature must be a number, got '1'
    """
    if isinstance(value, int | numbers.Real) and not isinstance(value, bool):
        return whole(name, value) if isinstance(value, int) else float(value)
    raise InputError(f"{name} must be a number, got {shown(value)}")


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
            value = _read(kind, text)
            break
    else:
        wanted = " or ".join(_name(kind) for kind in options)
        raise InputError(f"{what} must be {wanted}, got {shown(text)}")
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, int) and not isinstance(number, bool):
            whole(what, number)
    return value


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
