"""Acceptance is counted by depth, forgets slowly, and belongs to a request as far as its own tokens say so."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from outrider.lengths.acceptance import (
    COMMON,
    FADE,
    OWN,
    WEIGHT,
    Counts,
    ExpectedTokens,
    _moved,
    expected_tokens,
    prior_rates,
)
from recipes.length_simulation import step, tokens_by_length

NOBODY = Counts()


def counted(tested: Sequence[float], accepted: Sequence[float], drafts: float = 0.0) -> Counts:
    """Counts of tokens from depth 1 on, and of drafts that were all found."""
    return Counts(tested=(drafts, *tested), accepted=(drafts, *accepted))


def expected(counts: Counts, pool: Counts = NOBODY, longest: int = 4, usual_hits: float = 1.0) -> ExpectedTokens:
    """What drafts of one request are worth, beside others that have the counts of a pool."""
    both = (np.zeros(longest + 1), np.zeros(longest + 1))
    for each in (counts, pool):
        for sums, values in zip(both, (each.tested, each.accepted), strict=True):
            sums[: len(values)] += values[: longest + 1]
    everyone = Counts(tested=tuple(both[0].tolist()), accepted=tuple(both[1].tolist()))
    return expected_tokens([counts], [everyone], [usual_hits], longest)


def rates(counts: Counts, pool: Counts = NOBODY, longest: int = 4) -> list[float]:
    """Acceptance by depth of a request whose drafts are always found."""
    worth = expected(counts, pool, longest).tokens[0]
    reached = np.append(1.0, np.diff(worth))
    return (reached[1:] / reached[:-1]).tolist()


def test_a_step_counts_the_tokens_that_were_tested_and_whether_a_draft_was_found():
    counts = Counts().after([step(3, 2, 3), step(3, 0, 3), step(0, 0, 3, room=3), step(0, 0, 3)])
    assert counts == Counts(tested=(3.0, 2.0, 1.0, 1.0), accepted=(2.0, 1.0, 1.0, 0.0), nodes=6.0, levels=6.0)
    longer = counts.after([step(4, 4, 1)])
    assert longer.tested == pytest.approx([3 * FADE + 1, 2 * FADE + 1, FADE + 1, FADE + 1, 1])
    assert longer.accepted == pytest.approx([2 * FADE + 1, FADE + 1, FADE + 1, 1, 1])


def test_counts_that_are_scaled_down_keep_their_rates():
    few = Counts(tested=(80.0, 40.0, 4.0), accepted=(20.0, 30.0, 1.0)).at_most(8)
    assert few.tested == pytest.approx([8.0, 8.0, 4.0])
    assert few.accepted == pytest.approx([2.0, 6.0, 1.0])


@pytest.mark.parametrize("drafted", [0, 1])
def test_counts_halve_in_250_steps_whether_they_draft_or_not(drafted):
    counts = Counts(tested=(40.0, 100.0), accepted=(40.0, 100.0))
    for _ in range(250):
        counts = counts.after([step(drafted, 0, 2), step(drafted, 0, 2)])
    assert counts.accepted[1] == pytest.approx(50.0)
    assert counts.tested[1] > 50.0 or not drafted
    assert counts.accepted[0] >= 20.0 - 1e-9


def test_before_any_draft_the_prior_decides():
    assert rates(NOBODY) == pytest.approx(prior_rates(4).tolist())
    assert expected(NOBODY).tokens[0].tolist() == pytest.approx(tokens_by_length(prior_rates(4).tolist()))
    assert expected(NOBODY, longest=1).deviations[0, 1] == pytest.approx(0.24 * math.sqrt(COMMON + OWN))


def test_few_counts_of_a_depth_lean_on_the_counts_of_all_depths():
    pool = counted([10.0, 6.0], [9.0, 3.0])
    tested, accepted = np.array([[10.0, 6.0, 0.0]]), np.array([[9.0, 3.0, 0.0]])
    [moved], _ = _moved(prior_rates(3)[None], tested, accepted, COMMON)
    leaning = [(9 + WEIGHT * moved[0]) / (10 + WEIGHT), (3 + WEIGHT * moved[1]) / (6 + WEIGHT), moved[2]]
    assert rates(NOBODY, pool, 3) == pytest.approx(leaning)


@pytest.mark.parametrize("accepted", [0.0, 1.0])
def test_a_depth_that_was_never_reached_follows_the_others(accepted):
    found = rates(NOBODY, counted([40.0], [40.0 * accepted]))
    assert (found[3] > prior_rates(4)[3]) == bool(accepted)
    assert sorted(found[1:]) == found[1:]


@pytest.mark.parametrize("variance", [0.3, 1.2])
@pytest.mark.parametrize("tested", [[1.0], [5.0, 2.0], [20.0, 10.0], [60.0, 50.0]])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9, 1.0])
def test_moved_rates_are_near_those_of_a_normal_prior_of_the_logit(share, tested, variance):
    before, counts = np.array([0.6, 0.7])[: len(tested)], np.array(tested)
    logits, shift = np.log(before / (1 - before)), np.linspace(-8, 8, 16001)
    grid = 1 / (1 + np.exp(-(logits[:, None] + shift)))
    log_posterior = (counts[:, None] * (share * np.log(grid) + (1 - share) * np.log(1 - grid))).sum(0)
    log_posterior -= shift**2 / (2 * variance)
    weights = np.exp(log_posterior - log_posterior.max())
    [moved], _ = _moved(before[None], counts[None], share * counts[None], variance)
    assert moved == pytest.approx(grid @ weights / weights.sum(), abs=0.07)


def test_what_was_tested_leaves_less_doubt():
    few, many = (expected(NOBODY, counted([n], [0.6 * n])).deviations[0, 1] for n in (4.0, 60.0))
    assert 0.24 * math.sqrt(OWN) < many < few < expected(NOBODY).deviations[0, 1]
    assert expected(counted([200.0, 120.0], [120.0, 80.0])).deviations[0, 1] < 0.05


@pytest.mark.parametrize("hits", [1.0, 0.4])
def test_the_deviation_of_expected_tokens_is_that_of_a_simulation(hits):
    random, asked = np.random.default_rng(0), 400.0 if hits == 1 else 20.0
    counts = Counts(tested=(asked, 100.0, 60.0, 40.0), accepted=(asked * hits, 60.0, 40.0, 30.0))
    worth, sure = expected(counts, longest=3, usual_hits=hits), counted(counts.tested[1:], counts.accepted[1:], 1e9)
    exact = np.array(rates(sure, longest=3))
    # How sure the first rate is says how far all logits move.
    deviation = expected(sure, longest=3).deviations[0, 1] / (exact[0] * (1 - exact[0]))
    drawn = 1 / (1 + np.exp(-np.log(exact / (1 - exact)) - deviation * random.normal(size=(20000, 1))))
    successes = hits * (asked + WEIGHT)
    found = random.beta(successes, asked + WEIGHT - successes, size=(20000, 1)) if hits < 1 else 1.0
    simulated = (found * np.cumprod(drawn, axis=1).cumsum(axis=1)).std(axis=0)
    assert worth.deviations[0, 1:] == pytest.approx(simulated, rel=0.06)


@pytest.mark.parametrize("true", [0.05, 0.3, 0.6, 0.95])
def test_a_request_finds_its_own_acceptance(true):
    random, own = np.random.default_rng(1), Counts()
    for _ in range(200):
        own = own.after([step(4, int(np.argmin(np.append(random.random(4) < true, False))), 1)])
    assert np.mean(rates(own)) == pytest.approx(true, abs=0.1)


def test_what_others_accepted_moves_what_is_expected_of_a_request_and_its_own_drafts_do_more():
    good, bad = counted([9.0, 8.0], [8.0, 8.0]), counted([7.0], [0.0])
    alone = expected_tokens([good], None, [1.0], 3)
    assert alone.tokens.tolist() == expected(good, longest=3).tokens.tolist()
    together = expected_tokens([good, bad, NOBODY], None, [1.0] * 3, 3)
    assert together.tokens[0, 3] < alone.tokens[0, 3]
    assert together.tokens[1, 3] < together.tokens[2, 3] < together.tokens[0, 3]
    assert expected(bad, longest=3).tokens[0, 3] < together.tokens[1, 3]
    assert together.deviations[2, 1] < expected(NOBODY).deviations[0, 1]


def test_drafts_longer_than_what_is_asked_for_do_not_matter():
    long, short = counted([3.0, 2.0, 1.0], [2.0, 1.0, 1.0]), counted([3.0, 2.0], [2.0, 1.0])
    for pools in (None, [long, short]):
        found = expected_tokens([long, NOBODY], pools, [1.0] * 2, 2)
        same = expected_tokens([short, NOBODY], pools and [short, short], [1.0] * 2, 2)
        assert found.tokens.tolist() == same.tokens.tolist()


def test_a_draft_that_is_seldom_found_brings_less_and_rooms_bound_what_it_brings():
    seldom = Counts(tested=(400.0,), accepted=(40.0,))
    worth = expected(seldom, usual_hits=0.5)
    assert worth.hits[0] == pytest.approx((40 + WEIGHT * 0.5) / (400 + WEIGHT))
    always = expected(NOBODY)
    assert worth.tokens[0] - 1 == pytest.approx(worth.hits[0] * (always.tokens[0] - 1))
    # The request's own drafts count beside those of all.
    assert expected(seldom, Counts(tested=(400.0,), accepted=(400.0,))).hits[0] < 0.15
    within = always.within([2])
    assert within.tokens[0].tolist() == always.tokens[0, [0, 1, 2, 2, 2]].tolist()
    assert within.deviations[0].tolist() == always.deviations[0, [0, 1, 2, 2, 2]].tolist()
    assert always.within([4]) is always
