"""Input from people: the error for wrong input, checks of numbers, reading text files. Imports nothing heavy."""

import difflib
import numbers
import operator
import os
from collections.abc import Iterable
from pathlib import Path


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
        outrider.inputs.InputError: max_new_tokens must be a whole number, got 4.5
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
        outrider.inputs.InputError: temperature must be a number, got '1'
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
