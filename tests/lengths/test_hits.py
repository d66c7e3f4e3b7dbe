"""How often a drafter finds a draft: counted in real engines; where none is found, nothing is grown."""

from dataclasses import replace

import pytest

import outrider
from outrider import Sampling
from outrider.core.types import Guess, Step
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine.engine import Engine
from outrider.lengths.costs import CostTable
from outrider.lengths.experience import Experience
from outrider.lengths.hits import WEIGHT, Hits
from outrider.trees.chain import ChainTree
from tests.world.models import llama

NEW = list(range(1, 20))
"""A text that repeats nothing."""


def test_counts_fade_and_lean_on_what_was_known_before():
    assert Hits().rate(before=0.3) == pytest.approx(0.3)
    hits = Hits(asked=10.0, found=4.0)
    assert hits.rate(before=0.5) == pytest.approx((4 + WEIGHT * 0.5) / (10 + WEIGHT))
    for _ in range(200):
        hits = hits.after(asked=1, found=1)
    assert hits.asked - hits.found == pytest.approx(6.0 / 2)
    for _ in range(200):
        hits = hits.after(asked=0, found=0)
    assert hits.asked - hits.found == pytest.approx(6.0 / 4)
    assert hits.at_most(8).rate(before=0.5) < hits.rate(before=0.5)
    assert hits.at_most(8).found / hits.at_most(8).asked == pytest.approx(hits.found / hits.asked)
    assert Hits(asked=400.0, found=120.0).variance() < Hits(asked=4.0, found=1.2).variance()


def running(length: str, drafter: str = "suffix:min_match=6") -> Engine:
    engine = outrider.load(llama(), drafter=drafter, length=length)
    table = CostTable.of_formula(lambda requests, drafted: 1 + 0.01 * drafted)
    engine.parts = replace(engine.parts, experience=Experience(table))
    return engine


def steps(engine: Engine, count: int = 24) -> list[Step]:
    """The steps of a request whose text repeats nothing that is long enough."""
    found: list[Step] = []
    engine.add(NEW, max_new_tokens=count, sampling=Sampling(temperature=5.0, seed=3), ignore_eos=True)
    while engine.busy:
        engine.step(found.append)
    return found


def test_a_step_says_how_long_a_draft_it_had_room_for_although_none_was_found():
    made = steps(running("fixed:3"))
    assert [step.num_draft_tokens for step in made] == [0] * 24
    assert all(step.room > 0 for step in made[:-1])
    assert made[-1].room == 0


def test_an_engine_learns_that_its_drafter_finds_nothing_and_asks_no_more():
    engine, asked = running("goodput"), []
    engine.parts = replace(
        engine.parts, experience=Experience(CostTable.of_formula(lambda b, drafted: 1 + 0.2 * drafted))
    )
    for _ in range(8):
        found: list[Step] = []
        engine.add(NEW, max_new_tokens=24, sampling=Sampling(temperature=5.0), ignore_eos=True)
        while engine.busy:
            engine.step(found.append)
        asked.append(sum(step.room > 0 for step in found))
        assert not any(step.num_draft_tokens for step in found)
    hits = engine.parts.experience.sampled.hits
    assert hits.found == 0
    assert 0.5 * sum(asked) < hits.asked < sum(asked)
    assert hits.rate(SuffixDrafter.usual_hits) < 0.1
    assert asked[-1] < asked[0]


def test_where_nothing_is_found_no_tree_is_asked(monkeypatch: pytest.MonkeyPatch):
    calls: list[int] = []
    choose = ChainTree.choose
    monkeypatch.setattr(ChainTree, "choose", lambda *given: (calls.append(1), choose(*given))[1])
    steps(running("fixed:3"))
    assert not calls
    begin = SuffixDrafter.begin

    def proposing(self: SuffixDrafter, states, depths) -> Guess:  # type: ignore[no-untyped-def]
        guess = begin(self, states, depths)
        guess.tokens[:] = 1
        return guess

    monkeypatch.setattr(SuffixDrafter, "begin", proposing)
    steps(running("fixed:1"))
    assert calls


def test_under_goodput_a_drafter_that_looks_tokens_up_is_told_nothing(monkeypatch: pytest.MonkeyPatch):
    told: list[int] = []
    monkeypatch.setattr(SuffixDrafter, "observe", lambda self, states, observed: told.append(len(states)))
    steps(running("goodput"))
    assert not told
    steps(running("fixed:3"))
    assert told
