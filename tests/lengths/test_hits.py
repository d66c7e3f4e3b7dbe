"""How often a drafter finds a draft: counted in real engines; where none is found, nothing is grown."""

from dataclasses import replace

import pytest

import outrider
from outrider import Sampling
from outrider.core.types import Guess, Step
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine.engine import Engine
from outrider.lengths.acceptance import expected_tokens
from outrider.lengths.costs import CostTable, StepCost
from outrider.lengths.experience import Experience
from outrider.trees.chain import ChainTree
from tests.world.models import llama

NEW = list(range(1, 20))
"""A text that repeats nothing."""


def running(length: str, drafter: str = "suffix:min_match=6,max_warm_tokens=0") -> Engine:
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
    # To look for a draft takes a fiftieth of a step.
    rows = [StepCost(requests=1, length=n, target=1 + 0.2 * n, drafter=0.02 * (n > 0)) for n in range(17)]
    engine.parts = replace(engine.parts, experience=Experience(CostTable(rows=tuple(rows))))
    for _ in range(8):
        found: list[Step] = []
        engine.add(NEW, max_new_tokens=24, sampling=Sampling(temperature=5.0), ignore_eos=True)
        while engine.busy:
            engine.step(found.append)
        asked.append(sum(step.room > 0 for step in found))
        assert not any(step.num_draft_tokens for step in found)
    pool = engine.parts.experience.sampled
    assert pool.accepted == (0.0,)
    assert 0.5 * sum(asked) < pool.tested[0] < sum(asked)
    assert expected_tokens([pool], [pool], [SuffixDrafter.usual_hits], 8).hits[0] < 0.1
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
