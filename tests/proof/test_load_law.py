"""A length chosen for the batch keeps every request's law, over steps whose lengths depend on what was accepted."""

from dataclasses import dataclass, field, replace

import pytest

from outrider.lengths.experience import Choice, Experience
from outrider.lengths.goodput import GoodputLength
from outrider.proof.enumerate import joint_law
from outrider.proof.rule import law_error
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.token import TokenVerifier
from tests.world.biased import RecoversFromTheTarget
from tests.world.tables import tables
from tests.world.verifiers import FOR_ANY_LENGTH, each, judges_of

BOUND = 1e-12
STOPPED = each(name for name in judges_of("sampled chain") if name in FOR_ANY_LENGTH)


@dataclass(frozen=True, kw_only=True)
class Noting(GoodputLength):
    """Notes all choices."""

    chosen: list[Choice] = field(default_factory=list)

    def choose(self, experience: Experience, num_requests: int) -> Choice:
        self.chosen.append(super().choose(experience, num_requests))
        return self.chosen[-1]


def even(most: int, credit: float = -1e9) -> Experience:
    """By which drafts and plain steps are about as good, so that each outcome changes the choice. With a reserve for
    trials, the first one drafts.
    """
    found = Experience(clocked=False)
    for requests in (1, 2):
        for length in range(most + 1):
            found.costs.set(requests, length, 1 + 0.57 * length)
        found.costs.pass_by(requests, 0)
    found.credit = credit
    return found


@pytest.mark.parametrize("verifier", STOPPED)
def test_three_steps_of_a_request_keep_the_law_where_their_length_follows_acceptance(verifier):
    policy = Noting(most=1, margin=0.0)
    [found] = joint_law(replace(tables(2, verifier, policy, seed=5), experience=even(1)), [[1]], num_steps=3)
    assert found.error < BOUND
    assert sum(found.emitted.values()) == pytest.approx(1, abs=1e-12)
    assert {choice.length for choice in policy.chosen} == {0, 1}
    assert found.accepted > 0


@pytest.mark.parametrize("verifier", [TokenVerifier(), BlockVerifier()], ids=["token", "block"])
def test_steps_that_try_another_length_keep_the_law(verifier):
    policy = Noting(most=2, margin=0.0)
    [found] = joint_law(replace(tables(2, verifier, policy, seed=5), experience=even(2, 1e9)), [[1]], num_steps=2)
    assert found.error < BOUND
    assert any(choice.trial and choice.length > 0 for choice in policy.chosen)


@pytest.mark.parametrize("verifier", [TokenVerifier(), BlockVerifier()], ids=["token", "block"])
def test_two_requests_that_share_a_length_keep_their_laws(verifier):
    policy = Noting(most=1, margin=0.0)
    parts = replace(tables(2, verifier, policy, seed=6), experience=even(1))
    for found in joint_law(parts, [[0], [1, 1]], num_steps=2):
        assert found.error < BOUND
        assert sum(found.emitted.values()) == pytest.approx(1, abs=1e-12)
    assert {choice.length for choice in policy.chosen} == {0, 1}


def test_the_worlds_of_an_enumeration_do_not_learn_from_each_other():
    parts = replace(tables(2, TokenVerifier(), GoodputLength(most=2), seed=5), experience=even(2, 0.0))
    before = parts.experience.costs.num_steps
    first = joint_law(parts, [[1]], num_steps=2)
    assert parts.experience.costs.num_steps == before
    assert joint_law(parts, [[1]], num_steps=2) == first


def test_a_biased_rule_is_caught_over_several_steps_too():
    parts = replace(tables(2, RecoversFromTheTarget(), GoodputLength(most=2), seed=5), experience=even(2))
    [found] = joint_law(parts, [[1]], num_steps=2)
    assert found.error > 1e-3


def test_the_law_of_an_engines_own_parts_is_found_without_their_experience():
    parts = tables(3, TokenVerifier(), GoodputLength())
    assert law_error(parts) < BOUND
    assert parts.experience.costs.num_steps == 0
