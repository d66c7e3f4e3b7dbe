"""Rows at the bounds of top-p and min-p: what rounding may move, and what it may not."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.core.sampling import to_rows
from outrider.core.texts import Before
from outrider.core.types import Sampling
from outrider.proof.nodes import PROBABILITIES, row_difference
from outrider.proof.plain import SLACK, transformers_rows

WIDTH = 60_000
BOUNDED = [Sampling(temperature=1.3, top_p=0.8), Sampling(temperature=1.0, min_p=0.3), Sampling(top_k=20, top_p=0.7)]


@pytest.fixture(scope="module")
def logits():
    """A flat row of a large vocabulary: thousands of tokens lie within a rounding of a bound."""
    return torch.linspace(0, 2, WIDTH, dtype=torch.float64)[torch.randperm(WIDTH, generator=torch.manual_seed(0))]


def row(logits, sampling, slack=0.0):
    return transformers_rows(logits[None], [[1, 2]], 2, sampling, slack)[0]


def difference(logits, sampling, ours):
    return row_difference(ours, row(logits, sampling, -SLACK), row(logits, sampling, SLACK))


@pytest.mark.parametrize("share", [-0.9, -0.3, 0.0, 0.3, 0.9])
@pytest.mark.parametrize("sampling", BOUNDED, ids=str)
def test_a_bound_that_rounding_has_moved_is_no_fault(logits, sampling, share):
    assert difference(logits, sampling, row(logits, sampling, share * SLACK)) < 1e-9


@pytest.mark.parametrize("slack", [-10, 10])
@pytest.mark.parametrize("sampling", BOUNDED[:2], ids=str)
def test_a_bound_that_is_further_off_is_one(logits, sampling, slack):
    assert difference(logits, sampling, row(logits, sampling, slack * SLACK)) > PROBABILITIES


def test_several_tokens_lie_between_the_bounds(logits):
    sampling = BOUNDED[0]
    assert ((row(logits, sampling, SLACK) > 0) & (row(logits, sampling, -SLACK) == 0)).sum() > 1


@pytest.mark.parametrize(
    ("kept", "fine"), [([0], True), ([0, 1], True), ([0, 1, 2], True), ([0, 2], False), ([1], False)]
)
def test_of_the_tokens_between_the_bounds_the_likeliest_are_kept(kept, fine):
    wide, narrow = torch.tensor([0.5, 0.3, 0.15, 0.05]), torch.tensor([1.0, 0.0, 0.0, 0.0])
    ours = torch.zeros(4).index_copy_(0, torch.tensor(kept), wide[kept])
    assert (row_difference(ours / ours.sum(), narrow, wide) < 1e-6) == fine


@pytest.mark.parametrize("token", ["kept", "dropped"])
def test_other_tokens_are_none_of_it(logits, token):
    sampling = BOUNDED[0]
    ours = row(logits, sampling)
    if token == "kept":
        ours[ours.argmax()] = 0
    else:
        ours[row(logits, sampling, SLACK).argmin()] = 1e-9
    assert difference(logits, sampling, ours / ours.sum()) > PROBABILITIES


def test_the_settings_of_another_request_are_a_fault(logits):
    assert difference(logits, BOUNDED[0], row(logits, replace(BOUNDED[0], top_p=0.81))) > PROBABILITIES


@pytest.mark.parametrize("width", [2**13, 151_936], ids=["likeliest tokens", "buckets"])
def test_the_nucleus_is_a_share_of_the_rows_own_mass(width):
    # Where many equal tokens stand behind few likely ones, a softmax in float32 misses a mass of 1 by some 1e-4.
    logits = torch.full((1, width), -7.3 + math.log(151_936 / width))
    logits[0, :400] = torch.linspace(0, 6, 400)
    sampling = Sampling(temperature=1.0, top_p=0.95)
    (ours,) = to_rows(logits, np.array([0]), [sampling], lambda: Before.of([[1, 2]], [[]]))
    assert difference(logits[0], sampling, ours) < 1e-4
