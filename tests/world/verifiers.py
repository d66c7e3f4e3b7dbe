"""The catalog's verifiers, as tests choose among them: by what their classes say."""

from collections.abc import Iterable

import pytest

from outrider.refusals import verifiers
from outrider.verifiers.protocol import Carrying, Verifier
from outrider.verifiers.traits import Kind

LOSSLESS = verifiers()
LOSSY = verifiers(lossy=True)
FOR_ANY_LENGTH = [name for name, make in LOSSLESS.items() if not make.needs_one_length]
CARRYING = [name for name, make in LOSSLESS.items() if issubclass(make, Carrying)]


def verifier(name: str) -> Verifier:
    """A verifier with its usual settings."""
    return (LOSSLESS | LOSSY)[name]()


def judges_of(kind: Kind) -> list[str]:
    """Names of the verifiers that keep the law on a kind of draft."""
    return [name for name, make in LOSSLESS.items() if kind in make.kinds]


def each(names: Iterable[str]) -> list:
    """One test for each of these verifiers."""
    return [pytest.param(verifier(name), id=name) for name in names]
