"""Costs are positive numbers in units of a forward; acceptance by rank is a share of steps."""

import pytest

import outrider
from outrider.bench.costs import Costs, measure_acceptance, measure_costs
from outrider.lengths.planned import Planned
from outrider.trees.fixed import Fixed, best_topology
from outrider.types import InputError


def test_costs_and_acceptance_of_the_embedded_pair_make_a_length_and_a_topology():
    engine = outrider.load(max_slots=2)
    prompt = engine.encode("Once upon a time there was a")
    costs = measure_costs(engine, prompt, max_new_tokens=40, rounds=1)
    assert costs.draft > 0
    assert costs.token >= 0
    policy = Planned(draft_cost=costs.draft, token_cost=costs.token)
    assert 1 <= policy.limit(policy.open()) <= policy.most
    acceptance = measure_acceptance(engine, [prompt, prompt], width=3, max_new_tokens=40)
    assert len(acceptance) == 3
    assert 0 < sum(acceptance) <= 1
    assert acceptance[0] == max(acceptance)
    children = best_topology(acceptance, 12, 5, costs.draft, costs.target(13))
    tree = Fixed(children=children)
    better = outrider.load(tree=tree, length="fixed:5")
    assert better.generate([prompt], max_new_tokens=8)[0].tokens


def test_target_costs_grow_by_the_token():
    assert Costs(draft=0.1, token=0.5).target(3) == [1.0, 1.5, 2.0]


def test_a_drafter_that_proposes_nothing_has_no_cost():
    engine = outrider.load(drafter="none")
    with pytest.raises(InputError, match="proposed nothing"):
        measure_costs(engine, [5, 6, 7], max_new_tokens=8, rounds=1)
