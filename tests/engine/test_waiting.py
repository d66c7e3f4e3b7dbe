"""Which waiting request gets the next slot, and how many wait; how deep a request drafts."""

from dataclasses import replace

import numpy as np
import pytest

from outrider.core.inputs import InputError
from outrider.core.types import Sampling
from outrider.engine.prefixes import BLOCK, _shared
from outrider.lengths.costs import CostTable
from outrider.lengths.experience import Experience
from outrider.lengths.goodput import GoodputLength
from outrider.trees.gumbel import GumbelTree
from outrider.verifiers.recursive import RecursiveVerifier
from tests.clocks import made_up
from tests.world.models import engine

GREEDY = Sampling(temperature=0, seed=0)
PROMPT = [5, 6, 7, 5, 6, 7, 5]


def test_requests_are_admitted_by_priority_and_then_by_arrival():
    busy, order = engine("none", max_slots=1), []
    for name, priority in (("a", 0), ("b", 2), ("c", -3), ("d", 2), ("e", 0)):
        busy.add([3, 4], id=name, max_new_tokens=3, sampling=GREEDY, priority=priority)
    assert (busy.num_waiting, busy.num_waiting_tokens) == (5, 10)
    busy.cancel("d")
    while busy.busy:
        for update in busy.step():
            if update.output is not None:
                order.append(update.id)
    assert order == ["c", "a", "e", "b"]
    assert (busy.num_waiting, busy.num_waiting_tokens) == (0, 0)


def test_waiting_requests_and_their_tokens_are_counted():
    busy, seen = engine("none", max_slots=2), []
    for i in range(5):
        busy.add([3] * (i + 1), max_new_tokens=2, sampling=GREEDY)
    while busy.busy:
        busy.step()
        seen.append((busy.num_waiting, busy.num_waiting_tokens))
    assert seen[0] == (3, 12)
    assert seen == sorted(seen, reverse=True)


def test_a_cap_on_drafts_holds_beside_requests_without_one():
    for length in (None, GoodputLength(most=6)):
        busy = engine("model", gamma=5)
        if length is not None:
            experience = Experience(CostTable.of_formula(made_up))
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
    busy.parts = replace(busy.parts, tree=GumbelTree(width=2), verifier=RecursiveVerifier())
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
        drafted.append((length <= 12, update.step.num_draft_tokens))
        length += len(update.tokens)
    assert any(near and count for near, count in drafted)
    assert not any(count for near, count in drafted if not near)


@pytest.mark.parametrize("name", ["max_draft_tokens", "max_draft_context"])
def test_negative_limits_are_refused(name):
    with pytest.raises(InputError, match=f"{name} must be >= 0"):
        engine("none").add(PROMPT, **{name: -1})


def test_common_beginnings_are_found_at_every_length():
    random = np.random.default_rng(0)
    for _ in range(200):
        same = random.integers(0, 3, size=random.integers(0, 3 * BLOCK)).tolist()
        ours, theirs = [*same, 7, *same], [*same, 8]
        most = int(random.integers(0, len(same) + 2))
        assert _shared(ours, theirs, most) == min(most, len(same))
        assert _shared(same, list(same), len(same)) == len(same)
