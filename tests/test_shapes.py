"""While tests run, shapes in the package's signatures are checked, in the first calls of each test."""

import gc
import weakref
from typing import Protocol, runtime_checkable

import numpy as np
import pytest
import torch
from beartype.roar import BeartypeCallHintParamViolation, BeartypeCallHintReturnViolation
from jaxtyping import Float
from torch import Tensor

from outrider.core.dice import Draws, inverse_cdf
from outrider.core.sampling import pack
from outrider.core.types import Ahead, Verdict
from outrider.trees.protocol import Level
from outrider.verifiers.protocol import residual
from tests.shapes import MOST, begin_test, checked

ROWS = torch.full((2, 3), 1 / 3)


@checked
def shorter(x: Float[Tensor, " n"], y: Float[Tensor, " n"]) -> int:
    return len(x)


def test_arguments_whose_axes_differ_are_refused():
    assert residual(ROWS, ROWS).shape == (2, 3)
    assert residual(ROWS[:1], ROWS[:1]).shape == (1, 3), "another call has sizes of its own"
    with pytest.raises(BeartypeCallHintParamViolation, match="n vocab"):
        residual(ROWS, ROWS[:1])
    with pytest.raises(BeartypeCallHintParamViolation, match="n vocab"):
        residual(ROWS, ROWS[:, :2])


def test_the_first_calls_of_each_test_are_checked():
    def adding():
        @checked
        def add(x: Float[Tensor, " n"], y: Float[Tensor, " n"]) -> int:
            return len(x)

        return add

    for calls in (lambda: adding(), lambda: shorter):
        begin_test()
        for _ in range(MOST):
            with pytest.raises(BeartypeCallHintParamViolation):
                calls()(ROWS[0], ROWS[0, 1:])
        assert calls()(ROWS[0], ROWS[0, 1:]) == 3, "one more call is not checked"


def test_sizes_of_calls_within_a_call_are_their_own():
    @checked
    def inner(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        return x

    @checked
    def outer(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        inner(torch.zeros(len(x) + 1))
        return x

    assert len(outer(torch.zeros(3))) == 3


def test_a_function_that_is_made_at_every_call_is_checked_each_time_and_keeps_nothing_of_the_last():
    class Seen:
        pass

    def adding(seen: Seen, number: int):
        @checked
        def add(x: Float[Tensor, " n"], y: Float[Tensor, " n"], *, times: int = 1) -> int:
            return number * times if seen else 0

        return add

    for number in range(3):
        seen = Seen()
        left, add = weakref.ref(seen), adding(seen, number)
        assert add(ROWS[0], ROWS[0]) == number
        assert add(ROWS[0], ROWS[0], times=5) == 5 * number
        with pytest.raises(BeartypeCallHintParamViolation, match="n"):
            add(ROWS[0], ROWS[0, 1:])
        with pytest.raises(BeartypeCallHintParamViolation, match="times"):
            add(ROWS[0], ROWS[0], times="5")
        del seen, add
        gc.collect()
        assert left() is None


def test_a_result_whose_axes_differ_from_the_arguments_is_refused():
    @checked
    def longer(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        return torch.zeros(len(x) + 1)

    with pytest.raises(BeartypeCallHintReturnViolation):
        longer(torch.zeros(3))


def test_shapes_that_were_seen_before_are_checked_against_the_other_axes_of_the_call():
    @checked
    def like(x: Float[Tensor, "*batch n"], y: Float[Tensor, "*batch m"], z: Float[Tensor, " n+m"]) -> None:
        pass

    x, y = torch.zeros(2, 5, 3), torch.zeros(2, 5, 4)
    for _ in range(2):
        like(x, y, torch.zeros(7))
        with pytest.raises(BeartypeCallHintParamViolation):
            like(x, y, torch.zeros(8))
        with pytest.raises(BeartypeCallHintParamViolation):
            like(x, y[:1], torch.zeros(7))
        with pytest.raises(BeartypeCallHintParamViolation):
            like(x.long(), y, torch.zeros(7))


def test_an_array_that_fits_only_one_side_leaves_no_sizes_of_the_other():
    @checked
    def either(x: Float[Tensor, " n"], y: Float[Tensor, "m n"] | Float[Tensor, "m k"], z: Float[Tensor, " m"]) -> None:
        pass

    for _ in range(2):
        either(torch.zeros(3), torch.zeros(2, 3), torch.zeros(2))
        either(torch.zeros(3), torch.zeros(2, 4), torch.zeros(2))
        with pytest.raises(BeartypeCallHintParamViolation):
            either(torch.zeros(3), torch.zeros(2, 4), torch.zeros(3))


def test_wrong_kinds_and_wrong_numbers_of_axes_are_refused():
    with pytest.raises(BeartypeCallHintParamViolation):
        residual(ROWS.long(), ROWS)
    with pytest.raises(BeartypeCallHintParamViolation):
        inverse_cdf(ROWS, ROWS)
    with pytest.raises(BeartypeCallHintParamViolation):
        pack([[True]])


def test_fields_of_values_are_checked():
    requests, tokens = np.zeros(2, dtype=np.int64), torch.zeros(2, dtype=torch.long)
    paths = np.zeros((2, 4), dtype=np.int64)
    assert Verdict(paths=paths, num_accepted=requests, next_tokens=tokens).carried == ()
    with pytest.raises(BeartypeCallHintParamViolation):
        Verdict(paths=paths, num_accepted=requests[:1], next_tokens=tokens)
    with pytest.raises(BeartypeCallHintParamViolation):
        Draws(requests=requests, slots=requests, purpose="guess")
    with pytest.raises(BeartypeCallHintParamViolation):
        Ahead(tokens=[1])


def test_methods_and_properties_are_checked():
    level = Level(
        owners=np.zeros(1, dtype=np.int64),
        nodes=np.zeros(1, dtype=np.int64),
        depth=0,
        values=np.zeros((1, 0)),
        logits=ROWS[:1],
        proposed=None,
        rows=None,
        so_far=lambda: None,
    )
    assert level.scores.shape == (1, 3)
    with pytest.raises(BeartypeCallHintParamViolation):
        Ahead(tokens=(1, 2)).part(1)


def test_a_protocol_wants_methods_of_the_class_and_attributes_of_the_object():
    @runtime_checkable
    class Named(Protocol):
        name: str

        def tell(self) -> str: ...

    class Right:
        def __init__(self, name: str | None) -> None:
            if name is not None:
                self.name = name

        def tell(self) -> str:
            return self.name

    class Mute(Right):
        tell = None

    for _ in range(2):
        assert isinstance(Right("a"), Named)
        assert not isinstance(Right(None), Named)
        assert not isinstance(Mute("a"), Named)
        assert not isinstance("a", Named)
