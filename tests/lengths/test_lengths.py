"""Length policies follow what happened, never what was drawn."""

import pytest

from outrider.lengths.fixed import Fixed
from outrider.lengths.heuristic import Heuristic
from outrider.types import InputError, Step, Timing


def step(drafted: int, accepted: int) -> Step:
    return Step(
        request="a",
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        tokens=(1,) * (accepted + 1),
        timing=Timing(),
        num_requests=1,
    )


def test_fixed_never_changes():
    policy = Fixed(num_speculative_tokens=3)
    assert policy.limit(policy.update(policy.open(), step(3, 0))) == 3


def test_heuristic_grows_by_two_after_full_acceptance_and_shrinks_by_one_otherwise():
    policy = Heuristic(num_speculative_tokens=5, most=8)
    state = policy.open()
    lengths = []
    for drafted, accepted in ((5, 5), (7, 7), (8, 8), (8, 3), (7, 0), (0, 0)):
        state = policy.update(state, step(drafted, accepted))
        lengths.append(policy.limit(state))
    assert lengths == [7, 8, 8, 7, 6, 6]


def test_heuristic_never_falls_below_one():
    policy = Heuristic(num_speculative_tokens=1)
    assert policy.limit(policy.update(policy.open(), step(1, 0))) == 1


@pytest.mark.parametrize("fields", [{"num_speculative_tokens": 0}, {"num_speculative_tokens": 30}, {"grow": -1}])
def test_impossible_fields_are_refused(fields):
    with pytest.raises(InputError):
        Heuristic(**fields)
