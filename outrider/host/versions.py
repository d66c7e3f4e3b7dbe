"""Installed libraries of versions that Outrider was not tested with, by the bounds of its own requirements.

Between minor versions, libraries rename and drop what the package leans on. Its requirements therefore end at the
newest minor versions that passed all tests. pip keeps to them when it installs Outrider, and not when it installs
something else later.
"""

import warnings
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement


class UntestedWarning(RuntimeWarning):
    """Libraries are installed in versions that Outrider was not tested with."""


@cache
def warn_of_untested() -> None:
    """Give a Python warning if libraries are installed that Outrider was not tested with; once per process."""
    try:
        sentence = untested(requires("outrider") or ())
    except PackageNotFoundError:
        # The package runs from a folder, without requirements.
        return
    if sentence is not None:
        warnings.warn(UntestedWarning(sentence), stacklevel=3)


def untested(requirements: Iterable[str]) -> str | None:
    """Which installed libraries are newer or older than requirements with an upper bound allow, and what to do; None
    where all of them are within their bounds.

    Args:
        requirements: As a package's metadata lists them.

    Example:
        >>> untested(["numpy", "numpy>=1"])
        >>> untested(["numpy<1"]).split("; ")[1]
        '`pip install "numpy<1"` installs what was tested'
    """
    outside: dict[str, str] = {}
    for requirement in map(Requirement, requirements):
        if not any(bound.operator.startswith(("<", "==", "~=")) for bound in requirement.specifier):
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            outside[f"{requirement.name} {installed}"] = f'"{requirement.name}{requirement.specifier}"'
    if not outside:
        return None
    return (
        f"Outrider was not tested with {', '.join(outside)}; `pip install {' '.join(outside.values())}` installs what "
        "was tested"
    )
