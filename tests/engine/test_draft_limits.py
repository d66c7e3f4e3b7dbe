"""Requests that draft less than the length policy lets them: a cap on depth, or on the context."""

from dataclasses import replace

import pytest

from outrider.core.inputs import InputError
from outrider.core.types import Sampling
from outrider.lengths.costs import CostTable
from outrider.lengths.experience import Experience
from outrider.lengths.goodput import GoodputLength
from outrider.trees.gumbel import GumbelTree
from outrider.verifiers.recursive import RecursiveVerifier
from tests.decoding.pearl_engines import pearl
from tests.world.models import engine

GREEDY = Sampling(temperature=0, seed=0)
PROMPT = [5, 6, 7, 5, 6, 7, 5]


def cheap(requests: int, length: int) -> float:
    """Seconds of a step: drafts cost next to nothing."""
    return 0.01 * (1 + 0.01 * length)


def test_a_cap_on_drafts_holds_beside_requests_without_one():
    for length in (None, GoodputLength(most=6)):
        busy = engine("model", gamma=5)
        if length is not None:
            experience = Experience(CostTable.of_formula(cheap))
            busy.parts = replace(busy.parts, length=length, experience=experience)
        caps, steps = {"free": None, "two": 2, "none": 0}, {}
        for name, cap in caps.items():
            busy.add(PROMPT, id=name, max_new_tokens=40, sampling=GREEDY, max_draft_tokens=cap)
        tokens = {}
        while busy.busy:
            for update in busy.step():
                steps.setdefault(update.id, []).append(update.step.num_draft_tokens)
                tokens.setdefault(update.id, []).extend(update.tokens)
        assert tokens["free"] == tokens["two"] == tokens["none"]
        assert max(steps["none"]) == 0
        assert max(steps["two"]) == 2
        assert max(steps["free"]) > 2


def test_a_cap_limits_the_depth_of_trees():
    busy = engine("model", gamma=4)
    busy.parts = replace(busy.parts, tree=GumbelTree(branching=(2, 1, 1, 1)), verifier=RecursiveVerifier())
    steps = []
    drawn = Sampling(temperature=1, seed=4)
    for cap in (1, 0):
        busy.add(PROMPT, max_new_tokens=30, sampling=drawn, max_draft_tokens=cap)
        busy.add(PROMPT, max_new_tokens=30, sampling=drawn)
        while busy.busy:
            busy.step(steps.append)
    by_request = {}
    for step in steps:
        by_request.setdefault(step.request, []).append(step)
    capped, free, off, _ = by_request.values()
    assert max(step.num_accepted_tokens for step in capped) == 1
    assert max(step.num_draft_tokens for step in capped) <= 2
    assert max(step.num_accepted_tokens for step in free) > 1
    assert max(step.num_draft_tokens for step in off) == 0


def test_drafts_end_where_the_context_is_too_long():
    busy, drafted = engine("model", gamma=3), []
    length = len(PROMPT)
    for update in busy.stream(PROMPT, max_new_tokens=30, sampling=GREEDY, max_draft_context=12):
        drafted.append((length, update.step.num_draft_tokens))
        length += len(update.tokens)
    assert all(count == min(3, max(0, 13 - before)) for before, count in drafted)
    assert {count for _, count in drafted} > {0, 3}


@pytest.mark.parametrize("name", ["max_draft_tokens", "max_draft_context"])
def test_negative_limits_are_refused(name):
    with pytest.raises(InputError, match=f"{name} must be >= 0"):
        engine("none").add(PROMPT, **{name: -1})


@pytest.mark.parametrize("clock", ["real", "simulated"])
def test_a_cap_holds_where_drafts_are_made_ahead(clock):
    busy, most, tokens = pearl(clock=clock), {}, {}
    for cap in (None, 0, 1, 2):
        busy.add(PROMPT, id=str(cap), max_new_tokens=30, sampling=GREEDY, max_draft_tokens=cap)
    while busy.busy:
        for update in busy.step():
            most[update.id] = max(most.get(update.id, 0), update.step.num_draft_tokens)
            tokens.setdefault(update.id, []).extend(update.tokens)
    assert len({tuple(own) for own in tokens.values()}) == 1
    assert most["0"] == 0
    # A step counts two blocks: the one that it verified, and the one that it threw away.
    assert most["2"] <= 4 < most["None"]
