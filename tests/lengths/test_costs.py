"""A table of costs gives back what was measured, lines between it, and forwards by their tokens beyond it."""

import json
from dataclasses import replace

import pytest

from outrider.lengths.costs import CostTable, StepCost


def row(requests: int, length: int, target: float, **fields) -> StepCost:
    return StepCost(requests=requests, length=length, target=target, **fields)


def seconds(table: CostTable, requests: int, length: int, drafting: int | None = None, context: int = 64, **fields):
    steps = table.steps(requests, sampled=fields.get("sampled", False), context=context, longest=8)
    return steps[requests if drafting is None else drafting][length]


TABLE = CostTable(
    rows=(
        row(1, 0, 3.0, rest=1.0),
        row(1, 4, 5.0, drafter=2.0, rest=2.0),
        row(4, 0, 6.0, rest=2.0),
        row(4, 4, 18.0, drafter=5.0, rest=6.0),
    )
)


def test_what_was_measured_comes_back():
    assert seconds(TABLE, 1, 0) == 4.0
    assert seconds(TABLE, 1, 4) == 9.0
    assert seconds(TABLE, 4, 4) == 29.0


def test_between_and_behind_measured_lengths_costs_follow_lines():
    assert seconds(TABLE, 1, 2) == pytest.approx(4.0 + 1.0 + 1.5)
    assert seconds(TABLE, 1, 8) == pytest.approx(7.0 + 4.0 + 3.0)
    assert seconds(TABLE, 2, 0) == pytest.approx(4.0 + 4 / 3)


def test_forwards_of_more_requests_than_were_measured_are_read_off_by_their_tokens():
    # 8 plain requests have as many tokens as 4 with a draft of 1.
    steps = TABLE.steps(8, sampled=False, context=64, longest=8)
    assert steps[0][0] == pytest.approx(9.0 + 2.0 + 4 / 3)


def test_who_does_not_draft_costs_the_drafter_nothing_and_the_target_the_padding():
    # All parts of a plain step but the target's; the drafter and the rest of one draft of four.
    assert seconds(TABLE, 4, 4, drafting=1) == pytest.approx(18.0 + 2.0 + 2.0 + 1 / 4 * 4.0)
    assert all(seconds(TABLE, 4, n, drafting=0) == 8.0 for n in range(9))
    assert all(seconds(TABLE, 4, 0, drafting=m) == 8.0 for m in range(5))


def test_a_draft_of_one_request_costs_the_forward_what_was_measured_and_more_of_them_follow_a_line():
    table = replace(TABLE, rows=(*TABLE.rows, row(4, 4, 9.0, drafting=1)))
    # A quarter of what four drafts of four add to the forward, and the line on to all of it.
    own = [seconds(table, 4, 4, drafting=m) - seconds(TABLE, 4, 4, drafting=m) for m in range(5)]
    assert own == pytest.approx([0.0, -9.0, -6.0, -3.0, 0.0])
    assert seconds(table, 4, 2, drafting=1) == pytest.approx(seconds(TABLE, 4, 2, drafting=1) - 0.75 * 6.0)
    # More requests, or fewer, than were measured: the same share.
    for b in (2, 8):
        others = seconds(TABLE, b, 4, drafting=1) - table._forwards(b, 4)[4]
        one = table._forwards(b, 4)[0] + 0.25 * (table._forwards(b, 4)[4] - table._forwards(b, 4)[0])
        assert seconds(table, b, 4, drafting=1) == pytest.approx(one + others)
    # No measurement is taken that says that one draft costs more than all, or less than none.
    for target in (1.0, 99.0):
        odd = replace(TABLE, rows=(*TABLE.rows, row(4, 4, target, drafting=1)))
        assert seconds(odd, 4, 4, drafting=1) == pytest.approx(seconds(TABLE, 4, 4, drafting=1) - 12.0 * (target < 6))


def test_sampled_steps_have_a_rest_of_their_own_and_share_their_forwards_with_greedy_ones():
    own = [row(1, 0, 5.0, sampled=True, rest=1.7), row(1, 4, 7.0, sampled=True, drafter=3.0, rest=4.0)]
    table = replace(TABLE, rows=(*TABLE.rows, *own))
    assert seconds(table, 1, 0, sampled=True) == pytest.approx((3 + 5) / 2 + 1.7)
    assert seconds(table, 1, 4, sampled=True) == pytest.approx((5 + 7) / 2 + 3.0 + 4.0)
    assert seconds(table, 1, 4) == pytest.approx((5 + 7) / 2 + 2.0 + 2.0)
    assert seconds(TABLE, 1, 4, sampled=True) == 9.0


def test_a_longer_context_costs_each_request_more():
    far = [row(1, 0, 3.0 + 4.48, context=512), row(1, 4, 5.0 + 8.96, drafter=2.0 + 4.48, context=512)]
    table = replace(TABLE, rows=(*TABLE.rows, *far))
    assert seconds(table, 1, 0) == 4.0
    assert seconds(table, 1, 0, context=512) == pytest.approx(4.0 + 4.48)
    assert seconds(table, 4, 4, context=512) == pytest.approx(29.0 + 4 * 8.96 + 4 * 4.48)
    assert seconds(table, 4, 4, drafting=1, context=512) == pytest.approx(23.0 + 4 * 8.96 + 4.48)
    assert seconds(table, 1, 0, context=16) == 4.0


def test_a_longer_context_may_cost_a_request_less_in_a_larger_step():
    near = {(r.requests, r.length): r for r in TABLE.rows if not r.sampled}
    alone = [replace(near[1, n], target=near[1, n].target + 4.48, context=512) for n in (0, 4)]
    four = [replace(near[4, n], target=near[4, n].target + 4 * 2.24, context=512) for n in (0, 4)]
    table = replace(TABLE, rows=(*TABLE.rows, *alone, *four))
    for b, slope in ((1, 4.48), (4, 2.24), (8, 2.24)):
        longer = seconds(table, b, 0, context=512) - seconds(TABLE, b, 0, context=512)
        assert longer == pytest.approx(b * slope)
    between = seconds(table, 2, 0, context=512) - seconds(TABLE, 2, 0, context=512)
    assert between == pytest.approx(2 * (4.48 * 2 / 3 + 2.24 / 3))


def test_a_table_survives_a_file():
    values = json.loads(json.dumps(replace(TABLE, looking=0.5).values()))
    assert CostTable.of_values(values).missed(1, sampled=False, context=64)[1] == pytest.approx(
        0.5 + TABLE.steps(1, sampled=False, context=64, longest=1)[0, 0]
    )
    values = json.loads(json.dumps(TABLE.values()))
    assert CostTable.of_values(values) == TABLE
    with pytest.raises((KeyError, TypeError)):
        CostTable.of_values({"rows": [{"requests": 1}], "catch_up": 0.0})


@pytest.mark.parametrize(
    "rows",
    [
        (),
        (row(1, 0, 1.0),),
        (row(1, 1, 1.0), row(1, 2, 1.0)),
        (row(1, 0, 1.0), row(2, 1, 1.0)),
        (row(1, 0, 0.0), row(1, 1, 1.0)),
        (row(1, 0, float("nan")), row(1, 1, 1.0)),
    ],
    ids=["no row", "no draft", "no plain step", "two numbers of requests", "no time", "no number"],
)
def test_costs_without_a_plain_step_and_a_longer_one_are_refused(rows):
    with pytest.raises(ValueError, match="needs a plain step and a longer one"):
        CostTable(rows=rows)


def test_two_measurements_at_other_speeds_of_the_machine_have_the_mean_of_their_quotients():
    rows = [StepCost(requests=1, length=n, target=1 + n, drafter=0.5 * n) for n in (0, 4)]
    one = CostTable(rows=tuple(rows), doubt=0.1)
    slow = CostTable(rows=tuple(row.times(3.0) for row in rows), doubt=0.1)
    assert [row.seconds for row in one.combined(slow).rows] == pytest.approx([1.0, 7.0])
    # The more certain one counts more, and kinds of steps that one alone has stay.
    more = StepCost(requests=1, length=2, target=6.0)
    dear = CostTable(rows=(rows[0], rows[1].times(2.0), more), doubt=0.05)
    both = one.combined(dear)
    assert [row.length for row in sorted(both.rows, key=lambda row: row.length)] == [0, 2, 4]
    steps = both.steps(1, sampled=False, context=64, longest=4)
    assert 7 * 1.2 < steps[1][4] / steps[0][0] < 14
    assert both.doubt < 0.05
