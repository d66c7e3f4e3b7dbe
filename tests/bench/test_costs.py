"""Costs are positive numbers in units of a forward."""

import pytest

import outrider
from outrider.bench.costs import Costs, measure_costs
from outrider.core.types import InputError
from outrider.lengths.planned import PlannedLength


def test_costs_of_the_embedded_pair_make_a_length():
    engine = outrider.load(max_slots=2)
    costs = measure_costs(engine, rounds=1)
    assert costs.draft > 0
    assert costs.token >= 0
    policy = PlannedLength(draft_cost=costs.draft, token_cost=costs.token)
    assert 1 <= policy.limit(policy.open()) <= policy.most


def test_costs_of_a_batch_are_those_of_its_own_forwards():
    """Every timed forward is over all copies, and a batch that does not fit is refused."""
    engine = outrider.load(max_slots=3)
    seen = []
    extend = engine.parts.target.extend

    def watched(segments, taps=()):
        seen.append([len(segment.tokens) for segment in segments])
        return extend(segments, taps)

    engine.parts.target.extend = watched
    costs = measure_costs(engine, rounds=1, num_requests=3)
    assert costs.draft > 0
    assert {1, 2, 5, 9} <= {segments[0] for segments in seen if len(segments) == 3 and len(set(segments)) == 1}
    with pytest.raises(InputError, match=r"num_requests must be in 1 .. 3, the engine's slots, got 4"):
        measure_costs(engine, num_requests=4)


def test_dearer_tokens_make_shorter_plans():
    lengths = [PlannedLength(draft_cost=0.1, token_cost=cost) for cost in (0.0, 0.1, 0.4)]
    assert [policy.limit(policy.open()) for policy in lengths] == sorted(
        (policy.limit(policy.open()) for policy in lengths), reverse=True
    )
    assert lengths[0].limit(lengths[0].open()) > lengths[2].limit(lengths[2].open())


def test_target_costs_grow_by_the_token():
    assert Costs(draft=0.1, token=0.5).target(3) == [1.0, 1.5, 2.0]


def test_a_drafter_that_proposes_nothing_has_no_cost():
    engine = outrider.load(drafter="none")
    with pytest.raises(InputError, match="proposed nothing"):
        measure_costs(engine, rounds=1)
