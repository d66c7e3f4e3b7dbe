"""Acceptance is pooled by depth, forgets slowly, and belongs to a request as far as its own tokens say so."""

import numpy as np
import pytest

from outrider.lengths.acceptance import (
    OWN_DECAY,
    VARIANCE,
    WEIGHT,
    WIDE_VARIANCE,
    OwnAcceptance,
    PooledAcceptance,
    prior_rates,
    rates_by_others,
    spreads_by_length,
    tokens_by_length,
)
from outrider.lengths.hits import Hits


def test_few_counts_lean_on_the_counts_of_all_depths():
    pooled = PooledAcceptance()
    assert pooled.rates(2) == prior_rates(2)
    pooled.tested, pooled.accepted = [10.0, 6.0], [9.0, 3.0]
    moved = OwnAcceptance(tested=(10.0, 6.0), accepted=(9.0, 3.0)).rates(prior_rates(3), WIDE_VARIANCE)
    leaning = [(9 + WEIGHT * moved[0]) / (10 + WEIGHT), (3 + WEIGHT * moved[1]) / (6 + WEIGHT), moved[2]]
    assert pooled.rates(3) == pytest.approx(leaning)


@pytest.mark.parametrize("accepted", [0.0, 1.0])
def test_a_depth_that_was_never_reached_follows_the_others(accepted):
    pooled = PooledAcceptance(tested=[40.0], accepted=[40.0 * accepted])
    assert (pooled.rates(4)[3] > prior_rates(4)[3]) == bool(accepted)
    assert sorted(pooled.rates(4)[1:]) == pooled.rates(4)[1:]


@pytest.mark.parametrize("drafted", [0, 1])
def test_counts_halve_in_200_steps_whether_they_draft_or_not(drafted):
    pooled = PooledAcceptance(tested=[100.0], accepted=[100.0], hits=Hits(asked=40.0, found=40.0))
    for _ in range(200):
        pooled.note([(drafted, 0), (drafted, 0)], asked=2 * drafted)
    assert pooled.accepted == pytest.approx([50.0])
    assert pooled.tested[0] > 50.0 or not drafted
    assert pooled.hits.found >= 20.0 - 1e-9


def test_the_spread_of_expected_tokens_is_that_of_a_simulation():
    random, rates, deviation = np.random.default_rng(0), np.array([0.6, 0.7, 0.75]), 0.1
    drawn = 1 / (1 + np.exp(-np.log(rates / (1 - rates)) - deviation * random.normal(size=(20000, 1))))
    simulated = np.cumprod(drawn, axis=1).cumsum(axis=1).std(axis=0)
    assert [deviation * slope for slope in spreads_by_length(rates.tolist())[1:]] == pytest.approx(simulated, rel=0.03)


def test_what_was_tested_leaves_less_variance():
    new, known = PooledAcceptance(), PooledAcceptance(tested=[60.0, 30.0], accepted=[30.0, 20.0])
    assert new.rates_and_variance(2) == (prior_rates(2), WIDE_VARIANCE)
    assert known.rates_and_variance(2)[1] < WIDE_VARIANCE / 10


def test_a_request_without_drafts_is_like_all_others():
    assert OwnAcceptance().rates([0.5, 0.4], variance=0.3) == [0.5, 0.4]


@pytest.mark.parametrize("true", [0.05, 0.3, 0.6, 0.95])
def test_a_request_finds_its_own_acceptance(true):
    random, own = np.random.default_rng(1), OwnAcceptance()
    for _ in range(200):
        own = own.after(4, int(np.argmin(np.append(random.random(4) < true, False))))
    found = np.mean(own.rates([0.6] * 4, variance=1.0))
    assert found == pytest.approx(true, abs=0.1)


def test_the_likeliest_logit_is_found():
    own = OwnAcceptance(tested=(20.0, 10.0), accepted=(4.0, 7.0))
    pooled, variance = np.array([0.9, 0.3]), 0.5
    logits, u = np.log(pooled / (1 - pooled)), np.linspace(-6, 6, 120001)
    rates = 1 / (1 + np.exp(-(logits[:, None] + u)))
    tested, accepted = np.array(own.tested)[:, None], np.array(own.accepted)[:, None]
    likelihood = (accepted * np.log(rates) + (tested - accepted) * np.log(1 - rates)).sum(0) - u**2 / (2 * variance)
    assert own.rates(pooled.tolist(), variance) == pytest.approx(rates[:, likelihood.argmax()].tolist(), abs=1e-3)


def test_own_evidence_fades_with_plain_steps():
    own = OwnAcceptance().after(2, 0)
    for _ in range(50):
        own = own.after(0, 0)
    assert own.tested == pytest.approx((OWN_DECAY**50, 0.0))


def test_tokens_are_the_sum_of_chances_to_come_so_far():
    assert tokens_by_length([0.5, 0.4, 0.1]) == pytest.approx([1, 1.5, 1.7, 1.72])


def test_what_others_accepted_moves_what_is_expected_of_a_request_and_its_own_drafts_do_not():
    good, bad, new = (
        OwnAcceptance(tested=(9.0, 8.0), accepted=(8.0, 8.0)),
        OwnAcceptance(tested=(7.0,), accepted=(0.0,)),
        OwnAcceptance(),
    )
    assert rates_by_others([good], 3) == [(prior_rates(3), WIDE_VARIANCE)]
    assert rates_by_others([good, new], 3)[0] == (prior_rates(3), WIDE_VARIANCE)
    of_good, of_bad, of_new = rates_by_others([good, bad, new], 3)
    assert of_good[0][0] < of_new[0][0] < of_bad[0][0]
    assert VARIANCE < of_new[1] < of_good[1] < WIDE_VARIANCE


def test_the_part_that_requests_have_in_common_is_the_likeliest_and_its_variance_is_that_of_the_curvature():
    other = OwnAcceptance(tested=(12.0, 5.0), accepted=(5.0, 4.0))
    moved, step = np.linspace(-3, 3, 60_001), 1e-4
    logits = np.log(np.array(prior_rates(2)) / (1 - np.array(prior_rates(2))))[:, None] + moved
    likelihood = -(moved**2) / 2 / (WIDE_VARIANCE - VARIANCE)
    for logit, tested, accepted in zip(logits, other.tested, other.accepted, strict=True):
        likelihood += accepted * logit - tested * np.log1p(np.exp(logit))
    at = int(likelihood.argmax())
    curvature = -(likelihood[at + 100] - 2 * likelihood[at] + likelihood[at - 100]) / (100 * step) ** 2
    _, (rates, variance) = rates_by_others([other, OwnAcceptance()], 2)
    assert rates == pytest.approx(1 / (1 + np.exp(-logits[:, at])), abs=1e-3)
    assert variance == pytest.approx(VARIANCE + 1 / curvature, rel=1e-2)


def test_drafts_longer_than_what_is_asked_for_do_not_matter():
    long = OwnAcceptance(tested=(3.0, 2.0, 1.0), accepted=(2.0, 1.0, 1.0))
    short = OwnAcceptance(tested=(3.0, 2.0), accepted=(2.0, 1.0))
    assert rates_by_others([long, OwnAcceptance()], 2) == rates_by_others([short, OwnAcceptance()], 2)
