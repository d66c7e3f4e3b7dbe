"""Costs of steps are learnt as comparisons: what slows all steps alike changes nothing, one slow step little."""

import math
from itertools import pairwise

import pytest

from outrider.lengths.costs import StepCosts


def step(costs: StepCosts, requests: int, length: int, seconds: float, *, trial: bool = False, ends: bool = False):
    """One step of a kind that is not the first of its kind."""
    costs.learn(requests, length, seconds, trial, ends)
    costs.pass_by(requests, length)


def ratio(costs: StepCosts, requests: int, length: int) -> float:
    table = costs.table(requests, length)
    return table[length] / table[0]


def taught(slowness: float = 1.0) -> StepCosts:
    """Plain steps of 10 ms are usual; drafts of 2 took 25 ms in a trial."""
    costs = StepCosts()
    for _ in range(12):
        step(costs, 4, 0, 0.010 * slowness)
    for i in range(4):
        step(costs, 4, 2, 0.025 * slowness, trial=True, ends=i == 3)
    return costs


@pytest.mark.parametrize("slowness", [1e-3, 1.0, 1e3])
def test_a_cost_is_what_a_trial_took_over_what_usual_steps_take(slowness):
    assert ratio(taught(slowness), 4, 2) == pytest.approx(2.5)


def test_a_machine_that_slows_down_changes_no_comparison():
    costs = taught()
    for i in range(300):
        step(costs, 4, 0, 0.010 * (1 + i / 50))
    for i in range(4):
        step(costs, 4, 2, 0.025 * 7, trial=True, ends=i == 3)
    assert ratio(costs, 4, 2) == pytest.approx(2.5, rel=0.05)


def test_usual_steps_never_change_their_own_cost():
    costs = taught()
    before = costs.table(4, 0)[0]
    for i in range(200):
        step(costs, 4, 0, 0.010 * (3 if i % 5 == 0 else 1))
    assert costs.table(4, 0)[0] == before


def test_one_slow_step_of_a_trial_changes_nothing():
    costs = taught()
    for i, seconds in enumerate((0.025, 0.900, 0.025, 0.025)):
        step(costs, 4, 2, seconds, trial=True, ends=i == 3)
    assert ratio(costs, 4, 2) == pytest.approx(2.5)


def test_trials_follow_a_cost_that_has_changed():
    costs = taught()
    for _ in range(8):
        step(costs, 4, 0, 0.010)
        for i in range(4):
            step(costs, 4, 2, 0.012, trial=True, ends=i == 3)
    assert ratio(costs, 4, 2) == pytest.approx(1.2, rel=0.01)


def test_an_unseen_cost_is_borrowed_from_the_nearest_kind_and_stays_its_own_once_seen():
    costs, none = taught(), StepCosts()
    for requests, length in ((4, 3), (5, 2), (7, 1)):
        above = ratio(costs, requests, length) / ratio(none, requests, length)
        assert above == pytest.approx(ratio(costs, 4, 2) / ratio(none, 4, 2))
    step(costs, 4, 3, 0.050)
    assert ratio(costs, 4, 3) == pytest.approx(5.0)


def test_costs_before_any_step_grow_with_the_draft_and_with_the_batch():
    costs = StepCosts()
    for requests in (1, 2, 8, 64):
        table = costs.table(requests, 8)
        assert all(a < b for a, b in pairwise(table))
    assert [ratio(costs, requests, 4) for requests in (1, 2, 8)] == sorted(ratio(costs, n, 4) for n in (1, 2, 8))


def test_passing_by_counts_a_kind_and_learns_nothing():
    costs = StepCosts()
    costs.pass_by(2, 3)
    assert (costs.num_steps, costs.last(2, 3), costs.last(2, 0), costs.rows()) == (1, 1, 0, [])
    assert costs.table(2, 3) == StepCosts().table(2, 3)


@pytest.mark.parametrize("wrong", [(0, 0, 1.0), (1, -1, 1.0), (1, 0, 0.0), (1, 0, math.inf), (1, 0, math.nan)])
def test_what_is_no_cost_is_refused(wrong):
    with pytest.raises(ValueError, match="no cost of a step"):
        StepCosts().set(*wrong)
