"""Trees are timed beside plain steps, for every way and number of requests, and leave nothing behind."""

from dataclasses import replace

import pytest

from outrider.plan import tree_times
from outrider.plan.prediction import Planner, Range, ranked
from outrider.plan.tree_times import TreeTimes, time_trees
from outrider.plan.ways import DraftConfiguration, ways_of
from tests.plan.test_prediction import CHEAP, chains, example
from tests.world.models import engine, free_slots


@pytest.fixture(autouse=True)
def few_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_times, "REPEATS", 2)


def test_every_tree_is_timed_for_every_number_of_requests_that_there_are_slots_for():
    used = engine("model")
    ways = list(ways_of("model", used.parts.drafter, lengths=(2,)))
    trees = [way for way in ways if way.tree != "chain"]
    for sampled in (False, True):
        found = time_trees(used.parts, ways, [1, 3, 99], sampled=sampled, seconds=60)
        assert set(found.over_plain) == set(trees)
        assert {tuple(times) for times in found.over_plain.values()} == {(1, 3)}
        assert all(value > 0 for times in found.over_plain.values() for value in times.values())
        assert found.doubt > 0
        assert set(free_slots(used)) == {8}


def test_chains_are_not_timed():
    used = engine("model")
    before = used.parts.target.num_forwards
    assert time_trees(used.parts, chains(), [1], sampled=True) == TreeTimes()
    assert used.parts.target.num_forwards == before


TREE = DraftConfiguration(drafter="model", tree="iid:2", verifier="recursive", length=2, widths=(2, 2), kind=None)


def planner(over_plain: dict[int, float]) -> Planner:
    return Planner(record=example(0.8), costs={"model": CHEAP}, trees=TreeTimes(over_plain={TREE: over_plain}))


def test_a_tree_that_was_timed_costs_what_it_took_beside_a_plain_step():
    found = planner({1: 1.5, 4: 3.0})
    for requests, over_plain in ((1, 1.5), (2, 2.0), (4, 3.0), (8, 3.0)):
        guess = CHEAP.tree(requests, TREE.widths, sampled=True, context=64)
        assert found.dearer(TREE, requests) * guess == pytest.approx(over_plain)
    assert Planner(record=example(0.8), costs={"model": CHEAP}).dearer(TREE, 1) == 1.0


def test_times_behind_the_measured_numbers_of_requests_are_called_extended():
    found = planner({1: 1.5, 4: 3.0})
    told = [found._doubts(TREE, requests)[1] for requests in (4, 8)]
    assert ["extended" in " ".join(notes) for notes in told] == [False, True]


def test_a_tree_that_was_timed_can_be_advised():
    made = [planner({1: 1.5}).predict(way, 1) for way in chains()]
    best = ranked(made)[0]
    tree = replace(best, way=TREE, speedup=Range(value=9.0, low=8.0, high=10.0))
    assert ranked([*made, replace(tree, timed=True)])[0].way == TREE
    assert ranked([*made, replace(tree, timed=False)])[0].way == best.way
