import math
from dataclasses import dataclass

import numpy as np
import pytest

from outrider.core.inputs import InputError
from outrider.core.option import Bounds, CheckedOptions, check, option


@dataclass(frozen=True, kw_only=True)
class Settings(CheckedOptions):
    count: int = option(1, least=1)
    share: float = option(0.5, above=0, most=1, note=" (1 is all)")
    decay: float = option(0.5, least=0, below=1)
    seconds: float | None = option(None, above=0, finite=False)
    shift: float = option(0.0)
    kind: str = option("a", among=("a", "b"))
    free: object = None


WRONG = {
    ("count", 0): "count must be >= 1, got 0",
    ("count", 1.5): "count must be a whole number, got 1.5",
    ("count", True): "count must be a whole number, got True",
    ("count", None): "count must be a whole number, got None",
    ("share", 0): "share must be in (0, 1] (1 is all), got 0",
    ("share", math.nan): "share must be in (0, 1] (1 is all), got nan",
    ("decay", 1): "decay must be in [0, 1), got 1",
    ("seconds", 0.0): "seconds must be > 0, got 0.0",
    ("seconds", math.nan): "seconds must be > 0, got nan",
    ("seconds", "1"): "seconds must be a number, got '1'",
    ("shift", math.inf): "shift must be finite, got inf",
    ("kind", "c"): "kind must be one of a, b, got 'c'",
}


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_wrong(name: str, value: object) -> None:
    with pytest.raises(InputError) as error:
        Settings(**{name: value})
    assert str(error.value) == WRONG[name, value]


RIGHT = [
    ("count", 1),
    ("share", 1),
    ("decay", 0),
    ("seconds", None),
    ("seconds", math.inf),
    ("shift", -3),
    ("kind", "b"),
]


@pytest.mark.parametrize(("name", "value"), [*RIGHT, ("free", object())])
def test_right(name: str, value: object) -> None:
    assert getattr(Settings(**{name: value}), name) == value


def test_a_new_default_keeps_the_bounds() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Larger(Settings):
        count: int = 8

    assert Larger().count == 8
    with pytest.raises(InputError, match=r"^count must be >= 1, got 0$"):
        Larger(count=0)


def test_numbers_become_pythons() -> None:
    settings = Settings(count=np.int64(3), share=np.float32(0.5))
    assert (type(settings.count), type(settings.share)) == (int, float)


def test_most_alone() -> None:
    with pytest.raises(InputError, match=r"^n must be <= 4, got 5$"):
        Bounds(most=4).check("n", 5)


def test_a_field_without_bounds_is_not_looked_at() -> None:
    @dataclass
    class Mixed:
        free: int = "text"  # type: ignore[assignment]
        bound: int = option(2, least=1)

    check(Mixed())
    with pytest.raises(InputError, match=r"^field bound of a thing must be >= 1, got 0$"):
        check(Mixed(bound=0), lambda name: f"field {name} of a thing")
