"""Metrics of steps made by hand, against numbers counted by hand."""

import pytest

from outrider.core import metrics
from outrider.core.types import Step, Timing


def steps(*pairs: tuple[int, int, int]) -> list[Step]:
    """Drafted, accepted and emitted of each step."""
    return [
        Step(
            request="a",
            num_draft_tokens=drafted,
            num_accepted_tokens=accepted,
            tokens=(0,) * emitted,
            timing=Timing(),
            num_requests=1,
        )
        for drafted, accepted, emitted in pairs
    ]


MADE = steps((3, 3, 4), (3, 1, 2), (3, 0, 1), (2, 2, 2))


def test_block_efficiency_counts_the_bonus_token_and_nothing_after_the_end():
    assert metrics.block_efficiency(MADE) == pytest.approx(9 / 4)


def test_acceptance_rate_is_accepted_over_drafted():
    assert metrics.acceptance_rate(MADE) == pytest.approx(6 / 11)


def test_acceptance_by_position():
    assert metrics.accepted_per_position(MADE) == [3, 2, 1]
    assert metrics.conditional_acceptance(MADE) == pytest.approx([3 / 4, 2 / 3, 1.0])


def test_no_steps_have_no_efficiency():
    assert metrics.block_efficiency([]) == 0.0
    assert metrics.acceptance_rate([]) == 0.0


def test_efficiency_is_one_where_only_bare_forwards_cost():
    v, c, calls, block = 1.1, 0.12, 4, 2.9
    assert metrics.efficiency(block / (v + c * calls), block, v, c, calls) == pytest.approx(1)
