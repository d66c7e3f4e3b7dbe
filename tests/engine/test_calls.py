"""What a step costs beside the models: Python calls per forward and per step, and waits for a GPU.

The bounds are what was counted with Python 3.11, and a few calls more. Newer versions make fewer. A change that makes
a count smaller lowers its bound.
"""

import json
from typing import Any

import pytest

from tests.engine import call_counts
from tests.world.forked import printed

Counts = dict[str, Any]
BOUNDS = {
    "a forward": 80,
    "a forward of 8 requests": 246,
    "a step without drafts": 275,
    "a step without drafts of 8 requests": 954,
    "a greedy step": 615,
    "a greedy step of 8 requests": 2170,
    "a sampled step": 715,
    "a sampled step of 8 requests": 2400,
}
"""Most calls."""


@pytest.fixture(scope="module")
def counts() -> Counts:
    """What `call_counts` prints: for each case the number of calls of each function, and the numbers of waits."""
    status, out, err = printed(call_counts.main)
    assert status == 0, err[-3000:]
    found: Counts = json.loads(out.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", BOUNDS)
def test_forwards_and_steps_make_no_more_calls_than_they_did(counts, case):
    total = sum(counts[case].values())
    often = sorted(counts[case].items(), key=lambda pair: -pair[1])[:20]
    assert total <= BOUNDS[case], f"{total} calls; most of them of {often}"


def test_no_call_of_a_forward_is_made_for_each_token(counts):
    assert counts["a forward of more tokens"] == counts["a forward"]


def test_a_step_waits_as_often_for_many_requests_and_long_drafts(counts):
    # Once for the tokens, and above temperature 0 once for their probabilities, once for the masses of the block rule.
    assert counts["waits"] == [[1] * 4, [3] * 4]


def test_a_step_that_nobody_watches_makes_nothing_for_a_watcher(counts):
    assert not any("Cycle" in name or "running" in name for case in BOUNDS for name in counts[case])


def test_calls_of_own_functions_alone_are_counted(counts):
    assert all(name.startswith("outrider.") for case in BOUNDS for name in counts[case])
    assert counts["a greedy step"]["outrider.decoding.step.StepDecoding.step"] == 1
