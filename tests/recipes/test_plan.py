"""The comparison of predicted and measured ways: its errors and its gates."""

from dataclasses import replace

import pytest

from outrider.core.types import InputError
from recipes.plan import Compared, Errors

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
    chosen=True,
)
WORSE = replace(GOOD, way="b", predicted=120.0, low=110.0, high=130.0, measured=118.0, chosen=False)


def test_good_predictions_pass():
    errors = Errors.of([PLAIN, GOOD, WORSE])
    assert errors.failures() == []
    assert (errors.ways, errors.covered, errors.kendall, errors.regret, errors.wrongly_plain) == (2, 1, 1, 0, 0)
    assert errors.tau[0] == pytest.approx(1 - 2.0 / 2.02)
    assert "| error of tokens per second | 1.8% |" in errors.markdown()


def test_predictions_that_are_off_fail():
    wrong = replace(GOOD, predicted_tau=2.4, predicted=200.0, low=190.0, high=210.0)
    assert len(Errors.of([PLAIN, wrong]).failures()) == 3


def test_plain_advised_where_drafts_are_faster_is_counted():
    errors = Errors.of([replace(PLAIN, chosen=True), replace(GOOD, chosen=False)])
    assert errors.wrongly_plain == 1
    assert errors.regret == pytest.approx(1 - 100 / 153)
    assert any("regret" in each for each in errors.failures())


def test_nothing_to_compare_is_refused():
    with pytest.raises(InputError, match="nothing to compare"):
        Errors.of([PLAIN])
