"""Several texts in one row: no text sees another, and the loss is that of texts which stand alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from transformers import PreTrainedModel

from outrider.core.types import InputError
from outrider.learning.batch import Document, TrainBatch
from outrider.learning.divergences import divergence
from outrider.learning.learner import Learner
from outrider.learning.packing import Packing, check_apart
from outrider.training.data.batches import Batches
from outrider.training.distill import Distilled
from outrider.training.positions import positions_of
from tests.world.learners import head_learner, moved
from tests.world.recurrent_zoo import tiny_recurrent
from tests.world.zoo import VOCAB, tiny

LENGTHS = (5, 17, 9, 12, 3, 17)


@pytest.fixture(autouse=True)
def exact(float64_stays_float64: None) -> None:
    """Norms and softmaxes too."""


def batch() -> TrainBatch:
    """Texts of different lengths; two of them share a row where they are packed, and more do."""
    dice = np.random.default_rng(0)
    texts = [Document(tokens=dice.integers(3, VOCAB, size=size), start=1) for size in LENGTHS]
    return Batches(texts, batch_size=len(texts), max_length=24, seed=0).batch(0)


def rows_seen(model: PreTrainedModel, seen: list[int]) -> None:
    """Note how many rows each forward of a model has."""
    model.get_decoder().layers[0].register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))


@given(lengths=some.lists(some.integers(1, 40), min_size=1, max_size=30))
def test_every_token_of_every_text_has_one_place_and_comes_back(lengths: list[int]) -> None:
    packing = Packing.of(lengths)
    width = max(lengths)
    assert packing.source.shape[1] == width
    assert packing.filled.sum() == sum(lengths)
    assert len(packing.source) <= max(1, 2 * sum(lengths) / width)
    for number, length in enumerate(lengths):
        places = packing.back[number, :length]
        assert np.array_equal(packing.source.flatten()[places], number * width + np.arange(length))
        assert np.array_equal(packing.positions.flatten()[places], np.arange(length))
        assert packing.filled.flatten()[places].all()


def compared(made: Learner) -> tuple[float, float, float]:
    """The loss of packed texts, the sum of their losses one by one, and the largest difference of a gradient."""
    whole = batch()

    def gradients() -> list[torch.Tensor]:
        found = [p.grad.clone() for p in made.parameters() if p.grad is not None]
        made.zero_grad()
        return found

    alone = 0.0
    for row in range(len(LENGTHS)):
        loss = made(Batches.share(whole, range(row, row + 1))).total
        loss.backward()
        alone += float(loss.detach())
    before = gradients()
    made.pack()
    packed = made(whole).total
    packed.backward()
    differences = [float((a - b).abs().max()) for a, b in zip(before, gradients(), strict=True)]
    return float(packed.detach()), alone, max(differences)


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "parallel", "dflash"])
def test_the_loss_of_a_head_is_the_sum_over_texts_that_stand_alone(kind: str) -> None:
    target = tiny("llama").requires_grad_(False)
    made = moved(head_learner(kind, target, loss="fkl").double())
    seen: list[int] = []
    rows_seen(target, seen)
    packed, alone, difference = compared(made)
    assert packed == pytest.approx(alone, rel=1e-12), (packed, alone)
    assert difference < 1e-10
    # The last forward is that of the step. The texts fill four rows.
    assert seen[-1] == 4 < len(LENGTHS)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_the_loss_of_a_draft_model_is_the_sum_over_texts_that_stand_alone(name: str) -> None:
    model = tiny(name, seed=1)
    made = Distilled(model, tiny("llama").requires_grad_(False), loss=divergence("fkl"))
    seen: list[int] = []
    rows_seen(model, seen)
    packed, alone, difference = compared(made)
    assert packed == pytest.approx(alone, rel=1e-12), (packed, alone)
    assert difference < 1e-10
    assert seen[-1] == 4


def test_other_texts_of_a_row_change_nothing_of_a_text() -> None:
    made = Distilled(tiny("llama", seed=1), None, loss=None)
    made.pack()
    whole = batch()
    other = whole.tokens.clone()
    other[1:] = (other[1:] + 5) % VOCAB
    with torch.no_grad():
        ours, theirs = (made._hidden(each)[0, : LENGTHS[0]] for each in (whole, replace(whole, tokens=other)))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_a_model_that_cannot_tell_texts_apart_is_refused() -> None:
    with pytest.raises(InputError, match=r"the target, a mamba2, cannot read several texts in one row .* leave out"):
        check_apart(tiny_recurrent("mamba2"), "the target")


def test_positions_of_their_own_are_refused() -> None:
    made = Distilled(tiny("llama"), None, loss=None, positions=positions_of("gaps", 384, 0))
    with pytest.raises(InputError, match="leave out --positions or --pack"):
        made.pack()
