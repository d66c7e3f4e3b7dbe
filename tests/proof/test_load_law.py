"""A length chosen for the batch keeps every request's law, over steps whose lengths depend on what was accepted."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from outrider.core.types import Running
from outrider.lengths.acceptance import Counts
from outrider.lengths.costs import CostTable
from outrider.lengths.experience import Experience, LengthChoice
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

    chosen: list[LengthChoice] = field(default_factory=list)

    def choose(self, experience: Experience, states: Sequence[Running], rooms: Sequence[int]) -> LengthChoice:
        self.chosen.append(super().choose(experience, states, rooms))
        return self.chosen[-1]

    @property
    def lengths(self) -> set[int]:
        return {length for choice in self.chosen for length in choice.lengths}


def even() -> Experience:
    """By which drafts seem doubtful: they go on after an accepted token, and stop after a rejected one."""
    found = Experience(CostTable.of_formula(lambda requests, length: requests * (1 + 0.62 * length), longest=2))
    found.sampled = Counts(tested=(6.0, 6.0), accepted=(6.0, 2.0))
    return found


@pytest.mark.parametrize("verifier", STOPPED)
def test_three_steps_of_a_request_keep_the_law_where_their_length_follows_acceptance(verifier):
    policy = Noting(most=1)
    [found] = joint_law(replace(tables(2, verifier, policy, seed=5), experience=even()), [[1]], num_steps=3)
    assert found.error < BOUND
    assert sum(found.emitted.values()) == pytest.approx(1, abs=1e-12)
    assert policy.lengths == {0, 1}
    assert found.accepted > 0


@pytest.mark.parametrize("verifier", [TokenVerifier(), BlockVerifier()], ids=["token", "block"])
def test_steps_that_try_a_token_while_drafts_rest_keep_the_law(verifier):
    policy, experience = Noting(most=2), even()
    experience.sampled = Counts(tested=(1.9, 1.9), accepted=(1.9, 0.0))
    [found] = joint_law(replace(tables(2, verifier, policy, seed=5), experience=experience), [[1]], num_steps=2)
    assert found.error < BOUND
    assert {choice.lengths[0] for choice in policy.chosen[::2]} == {1}
    assert 0 in policy.lengths


@pytest.mark.parametrize("verifier", [TokenVerifier(), BlockVerifier()], ids=["token", "block"])
def test_two_requests_that_are_chosen_for_together_keep_their_laws(verifier):
    policy = Noting(most=1)
    parts = replace(tables(2, verifier, policy, seed=6), experience=even())
    for found in joint_law(parts, [[0], [1, 1]], num_steps=2):
        assert found.error < BOUND
        assert sum(found.emitted.values()) == pytest.approx(1, abs=1e-12)
    assert policy.lengths == {0, 1}


def test_the_worlds_of_an_enumeration_do_not_learn_from_each_other():
    parts = replace(tables(2, TokenVerifier(), GoodputLength(most=2), seed=5), experience=even())
    first = joint_law(parts, [[1]], num_steps=2)
    assert parts.experience.num_steps == 0
    assert parts.experience.sampled.tested == (6.0, 6.0)
    assert joint_law(parts, [[1]], num_steps=2) == first


def test_a_biased_rule_is_caught_over_several_steps_too():
    parts = replace(tables(2, RecoversFromTheTarget(), GoodputLength(most=2), seed=5), experience=even())
    [found] = joint_law(parts, [[1]], num_steps=2)
    assert found.error > 1e-3


def test_the_law_of_an_engines_own_parts_is_found_without_their_experience():
    parts = tables(3, TokenVerifier(), GoodputLength())
    assert law_error(parts) < BOUND
    assert parts.experience.num_steps == 0
