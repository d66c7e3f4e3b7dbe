"""The comparison of predicted and measured ways: its errors and its gates."""

from dataclasses import replace

import pytest

from outrider.core.types import InputError
from recipes.plan import Compared, Errors, compared

PLAIN = Compared(
    temperature=1.0,
    requests=1,
    way="plain",
    plain=True,
    predicted_tau=1.0,
    measured_tau=1.0,
    predicted=100.0,
    low=95.0,
    high=105.0,
    measured=100.0,
    speedup=1.0,
    speedup_low=1.0,
    speedup_high=1.0,
    speedups=(1.0, 1.0),
)
GOOD = replace(
    PLAIN,
    way="a",
    plain=False,
    predicted_tau=2.0,
    measured_tau=2.02,
    predicted=150.0,
    low=140.0,
    high=160.0,
    measured=153.0,
    speedup=1.5,
    speedup_low=1.4,
    speedup_high=1.6,
    speedups=(1.53, 1.53),
    chosen=True,
)
WORSE = replace(
    GOOD,
    way="b",
    predicted=120.0,
    low=110.0,
    high=130.0,
    measured=118.0,
    speedup=1.2,
    speedup_low=1.1,
    speedup_high=1.3,
    speedups=(1.18, 1.18),
    chosen=False,
)


def test_good_predictions_pass():
    errors = Errors.of([PLAIN, GOOD, WORSE])
    assert errors.failures() == []
    assert (errors.ways, errors.covered, errors.kendall, errors.regret, errors.wrongly_plain) == (2, 1, 1, 0, 0)
    assert errors.tau[0] == pytest.approx(1 - 2.0 / 2.02)
    assert (errors.speedup_covered, errors.regret_elsewhere) == (1, 0)
    [table] = errors.findings().tables
    assert "| error of tokens per second | 1.8% |" in table.markdown()
    assert "| error of the speedup over plain decoding | 1.8% |" in table.markdown()


def test_predictions_that_are_off_fail():
    wrong = replace(GOOD, predicted_tau=2.4, predicted=200.0, low=190.0, high=210.0)
    assert len(Errors.of([PLAIN, wrong]).failures()) == 3


def test_plain_advised_where_drafts_are_faster_is_counted():
    errors = Errors.of([replace(PLAIN, chosen=True), replace(GOOD, chosen=False)])
    assert errors.wrongly_plain == 1
    assert errors.regret == pytest.approx(1 - 1 / 1.53)
    assert any("regret" in each for each in errors.failures())


def test_a_way_that_was_best_by_luck_in_one_round_is_not_compared_in_it():
    # Each of two ways has one lucky round, in which the advised one is slower by a third.
    advised = replace(GOOD, speedups=(1.5, 1.5, 1.5, 1.5))
    lucky = replace(GOOD, way="b", chosen=False, speedups=(2.0, 1.5, 2.0, 1.5))
    errors = Errors.of([PLAIN, advised, lucky])
    assert errors.regret == pytest.approx(1 - 1.5 / 1.75)
    assert errors.regret_elsewhere == pytest.approx(0.0)


def test_measured_speedups_are_those_beside_the_plain_runs_of_each_round():
    ends = {"value": 1.0, "low": 1.0, "high": 1.0}
    head = {"temperature": 1.0, "requests": 2, "name": "a"}
    named = {"drafter": "model", "tree": "chain", "verifier": "match", "length": 3}
    predicted = {**head, **named, "block_efficiency": ends, "tokens_per_second": ends, "speedup": ends, "chosen": True}
    # The machine is half as fast in the second round.
    runs = [
        {**head, "round": 0, "tokens": 8, "steps": 4, "timed": 6, "seconds": 1.0, "beside": 4.0},
        {**head, "round": 1, "tokens": 8, "steps": 2, "timed": 6, "seconds": 2.0, "beside": 2.0},
    ]
    [found] = compared([predicted, {**predicted, "name": "never ran"}], runs)
    assert found.speedups == (1.5, 1.5)
    assert found.measured == pytest.approx(4.0)
    assert found.measured_tau == pytest.approx(16 / 6)


def test_nothing_to_compare_is_refused():
    with pytest.raises(InputError, match="nothing to compare"):
        Errors.of([PLAIN])
