"""Which waiting request gets the next slot, how many wait, and which beginning of a prompt is in a cache already."""

import numpy as np

from outrider.core.types import Sampling
from outrider.engine.prefixes import BLOCK, _shared
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


def test_common_beginnings_are_found_at_every_length():
    random = np.random.default_rng(0)
    for _ in range(200):
        same = random.integers(0, 3, size=random.integers(0, 3 * BLOCK)).tolist()
        ours, theirs = [*same, 7, *same], [*same, 8]
        most = int(random.integers(0, len(same) + 2))
        assert _shared(ours, theirs, most) == min(most, len(same))
        assert _shared(same, list(same), len(same)) == len(same)


def test_a_prompt_that_has_no_share_of_a_step_waits_for_the_next_one():
    busy, contexts = engine("ngram", max_slots=2), []
    busy.max_prefill_tokens = 6
    # The first prompt takes the whole budget of the first step.
    busy.add(PROMPT, max_new_tokens=2, sampling=GREEDY)
    busy.add([9] * 40, id="long", max_new_tokens=1, sampling=GREEDY)
    while busy.busy:
        busy.step()
        contexts.append(busy.num_cached_tokens)
    assert max(np.diff([0, *contexts])) <= 6 + 2 * 4
    assert len(contexts) >= 7
