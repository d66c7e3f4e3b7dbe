"""Acceptance is pooled by depth, forgets slowly, and belongs to a request as far as its own tokens say so."""

import numpy as np
import pytest

from outrider.lengths.acceptance import (
    HALF_LIFE,
    OWN_DECAY,
    WEIGHT,
    WIDE_VARIANCE,
    OwnAcceptance,
    PooledAcceptance,
    prior_rates,
    tokens_by_length,
)


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


def test_counts_halve_after_a_half_life_of_tested_tokens():
    pooled = PooledAcceptance(tested=[100.0], accepted=[100.0])
    for _ in range(int(HALF_LIFE) // 2):
        pooled.note([(1, 0), (1, 0)])
    assert pooled.accepted == pytest.approx([50.0])


def test_requests_that_draft_nothing_count_for_nothing():
    pooled = PooledAcceptance(tested=[8.0], accepted=[4.0])
    pooled.note([(0, 0), (0, 0)])
    assert (pooled.tested, pooled.accepted) == ([8.0], [4.0])


def test_the_spread_of_expected_tokens_is_that_of_a_simulation():
    random, counts = np.random.default_rng(0), (60.0, 40.0, 20.0)
    pooled = PooledAcceptance(tested=list(counts), accepted=[45.0, 26.0, 9.0])
    rates = np.array(pooled.rates(3))
    weight = np.array(counts) + WEIGHT
    drawn = random.beta(rates * weight, (1 - rates) * weight, size=(20000, 3))
    assert pooled.spread(3) == pytest.approx(np.cumprod(drawn, axis=1).sum(1).std(), rel=0.1)
    assert PooledAcceptance().spread(3) > 2 * pooled.spread(3)


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
