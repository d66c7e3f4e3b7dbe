"""Drafts that are known before a step are as long as their promises pay, as far as such promises were kept before."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

import outrider
from outrider.core.types import Running, Sampling, Step
from outrider.lengths.acceptance import FADE, Counts, promised_tokens
from outrider.lengths.costs import CostTable, StepCost
from outrider.lengths.experience import Experience
from outrider.lengths.goodput import GoodputLength
from recipes.length_simulation import step
from tests.lengths.test_goodput import DRAWN, GREEDY, running
from tests.world.models import llama

POLICY = GoodputLength()
NOBODY = Counts()


def promising(drafted: int, accepted: int, promise: float) -> Counts:
    """The counts of a step whose drafter promised the same of each token."""
    return NOBODY.after([replace(step(drafted, accepted, 1, room=drafted), promised=(promise,) * drafted)])


def many(promise: float, rate: float, tokens: float = 400.0) -> Counts:
    """Counts of drafts of one token."""
    return Counts(tested=(tokens, tokens), accepted=(tokens, rate * tokens), promised=(0.0, promise * tokens))


def chosen(experience: Experience, states: Sequence[Running], promised: Sequence[Sequence[float] | None]) -> list[int]:
    choice = POLICY.choose(experience, states, [16] * len(states))
    assert all(choice.lengths)
    shorter = POLICY.shorten(experience, states, choice, promised)
    assert [list(each) for each in shorter.promised] == [list(each or ()) for each in promised]
    return list(shorter.lengths)


def costing(draft: float, jump: float = 0.0) -> Experience:
    """A draft of n tokens costs 1 + n `draft` and the jump."""
    return Experience(CostTable.of_formula(lambda requests, length: 1 + length * draft + jump * (length > 0)))


def test_promises_of_tested_tokens_are_counted_and_fade():
    counts = promising(4, 2, 0.8)
    assert counts.tested == (1.0, 1.0, 1.0, 1.0, 0.0)
    assert counts.promised == (0.0, 0.8, 0.8, 0.8)
    later = counts.after([replace(step(1, 1, 1), promised=(0.5,))])
    assert later.promised == pytest.approx([0.0, 0.8 * FADE + 0.5, 0.8 * FADE, 0.8 * FADE])
    assert promising(2, 2, 0.7).promised == (0.0, 0.7, 0.7)
    assert many(0.5, 0.5).at_most(4).promised == pytest.approx([0.0, 2.0])


def test_nothing_known_leaves_promises_as_they_are():
    worth = promised_tokens([[0.9, 0.5, 0.5], [], [0.25]], [NOBODY] * 3, [NOBODY] * 3, 4)
    expected = [[1, 1.9, 2.35, 2.575, 2.575], [1] * 5, [1] + [1.25] * 4]
    assert worth.tokens == pytest.approx(np.array(expected))
    assert worth.hits.tolist() == [1, 0, 1]
    assert (worth.deviations[1] == 0).all()
    assert (worth.deviations[0, 1:] > 0).all()


@pytest.mark.parametrize(("promise", "rate"), [(0.9, 0.6), (0.4, 0.8), (0.7, 0.7)])
@pytest.mark.parametrize("whose", ["own", "others'"])
def test_what_such_promises_were_worth_moves_them(promise: float, rate: float, whose: str):
    seen = many(promise, rate)
    counts = [seen if whose == "own" else NOBODY]
    worth = promised_tokens([[promise, 0.99]], counts, [seen], 2)
    assert worth.tokens[0, 1] == pytest.approx(1 + rate, abs=0.02)
    # Odds are multiplied: a promise that is nearly certain stays so.
    assert worth.tokens[0, 2] - worth.tokens[0, 1] > 0.85 * (worth.tokens[0, 1] - 1)


def test_a_request_whose_promises_are_broken_counts_less_than_others():
    pool = many(0.7, 0.7)
    good, bad = many(0.7, 0.9, 40.0), many(0.7, 0.1, 40.0)
    both = promised_tokens([[0.7], [0.7]], [good, bad], [pool, pool], 1).tokens[:, 1]
    assert both[0] > 1.7 > both[1]
    alone = promised_tokens([[0.7], [0.7]], [good, bad], None, 1).tokens[:, 1]
    assert alone[0] > alone[1]


def test_a_draft_ends_where_the_next_token_does_not_pay():
    experience = costing(0.1)
    experience.greedy = many(0.7, 0.7)
    sure, doubtful = [0.97] * 16, [0.97] * 4 + [0.2] * 12
    [length] = chosen(experience, running(1), [sure])
    assert length > 8
    assert chosen(experience, running(1), [doubtful]) == [4]
    assert chosen(experience, running(1), [[0.05] * 3]) == [0]


def test_the_longest_draft_has_sixteen_tokens_and_no_more_than_were_found():
    experience = costing(0.001)
    experience.greedy = many(0.7, 0.9)
    assert chosen(experience, running(1), [[0.9] * 40]) == [16]
    assert chosen(experience, running(1), [[0.9] * 5]) == [5]
    assert chosen(experience, running(1), [[]]) == [0]


def test_one_of_many_requests_that_found_a_draft_drafts_unless_the_step_becomes_too_slow_for_the_others():
    found = [[0.95] * 16, *[[]] * 3]
    for jump, drafts in ((0.0, True), (6.0, False)):
        experience = costing(0.02, jump)
        experience.greedy = Counts(tested=(99.0,) * 17, accepted=(99.0,) * 17, promised=(0.0, *[95.0] * 16))
        lengths = chosen(experience, running(4), found)
        assert (lengths[0] > 0) == drafts
        assert lengths[1:] == [0, 0, 0]


def test_who_promises_nothing_keeps_its_length():
    experience = costing(0.05)
    states = running(2)
    choice = POLICY.choose(experience, states, [16, 16])
    lengths = POLICY.shorten(experience, states, choice, [None, [0.9] * 3]).lengths
    assert lengths[0] == choice.lengths[0]
    assert 0 < lengths[1] <= 3


def test_without_costs_or_with_a_seed_and_costs_that_are_not_kept_the_fixed_length_stays():
    unknown = Experience()
    assert chosen(unknown, running(2), [[0.9] * 16, [0.1] * 2]) == [5, 2]
    table = replace(CostTable.of_formula(lambda requests, length: 1 + 0.05 * length), kept=False)
    assert chosen(Experience(table), running(1, DRAWN, repeats=True), [[0.1] * 16]) == [5]


def test_a_request_with_a_seed_reads_nothing_pooled():
    good, bad = costing(0.3), costing(0.3)
    good.sampled, bad.sampled = many(0.5, 0.95), many(0.5, 0.02)
    promised = [[0.5] * 16]
    states = running(1, DRAWN, repeats=True)
    assert chosen(good, states, promised) == chosen(bad, states, promised)
    assert chosen(good, running(1, GREEDY), promised) == chosen(bad, running(1, GREEDY), promised)
    choice, unseeded = POLICY.choose(good, states, [16]), running(1, DRAWN)
    some, others = (POLICY.shorten(each, unseeded, choice, promised).lengths for each in (good, bad))
    assert some != others


def test_an_engine_stops_its_drafts_by_promise_and_counts_what_it_asked_for():
    engine = outrider.load(llama(), drafter="suffix:min_match=1", length="goodput")
    table = CostTable.of_formula(lambda requests, drafted: 1 + 0.01 * drafted)
    engine.parts = replace(engine.parts, experience=Experience(table))
    steps = []
    engine.add([5, 6, 7, 8] * 6, max_new_tokens=60, sampling=Sampling(temperature=0), ignore_eos=True)
    while engine.busy:
        engine.step(steps.append)
    assert max(made.num_draft_tokens for made in steps) > 8
    assert all(len(made.promised) == made.num_draft_tokens <= made.room <= 16 for made in steps)
    assert all(0 < promise <= 1 for made in steps for promise in made.promised)
    assert 0 < sum(engine.parts.experience.greedy.promised) <= sum(engine.parts.experience.greedy.tested[1:])


@pytest.mark.parametrize(("looking", "looks"), [(0.005, True), (0.05, False)])
def test_a_draft_is_looked_for_where_that_costs_next_to_nothing_whatever_became_of_others(looking, looks):
    rows = [StepCost(requests=1, length=n, target=1 + 0.5 * n, drafter=looking * (n > 0)) for n in (0, 1, 16)]
    engine = outrider.load(llama(), drafter="suffix:min_match=1", length="goodput")
    experience = Experience(CostTable(rows=tuple(rows)))
    experience.greedy = many(0.5, 0.3, 4000.0)
    assert POLICY.choose(experience, running(1), [16]).lengths == [0]
    engine.parts = replace(engine.parts, experience=experience)
    steps: list[Step] = []
    engine.add([5, 6, 7, 8] * 16, max_new_tokens=60, sampling=Sampling(temperature=0), ignore_eos=True)
    while engine.busy:
        engine.step(steps.append)
    assert any(made.room for made in steps) == looks
    assert any(made.num_draft_tokens for made in steps) == looks
