"""While tests run, shapes and types in the package's signatures are checked in every call."""

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
from tests.shapes import checked

ROWS = torch.full((2, 3), 1 / 3)


def test_arguments_whose_axes_differ_are_refused():
    assert residual(ROWS, ROWS).shape == (2, 3)
    assert residual(ROWS[:1], ROWS[:1]).shape == (1, 3), "another call has sizes of its own"
    with pytest.raises(BeartypeCallHintParamViolation, match="n vocab"):
        residual(ROWS, ROWS[:1])
    with pytest.raises(BeartypeCallHintParamViolation, match="n vocab"):
        residual(ROWS, ROWS[:, :2])


def test_sizes_of_calls_within_a_call_are_their_own():
    @checked
    def inner(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        return x

    @checked
    def outer(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        inner(torch.zeros(len(x) + 1))
        return x

    assert len(outer(torch.zeros(3))) == 3


def test_a_result_whose_axes_differ_from_the_arguments_is_refused():
    @checked
    def longer(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        return torch.zeros(len(x) + 1)

    with pytest.raises(BeartypeCallHintReturnViolation):
        longer(torch.zeros(3))


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
