"""Goodput drafts what pays by the table and by the acceptance so far, per request, and reads no clock."""

import re
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from outrider.core.types import InputError, Request, Running, Sampling
from outrider.drafters.suffix import SuffixDrafter
from outrider.host import remembered
from outrider.lengths.acceptance import Counts, ExpectedTokens
from outrider.lengths.costs import CostTable, StepCost
from outrider.lengths.experience import MOST_RECALLED, RECORD, Experience, PolicyState
from outrider.lengths.goodput import HOLD, GoodputLength, _best, _Prices
from recipes.length_simulation import Lengths, World, judged, learnt, simulate, step, tokens_by_length
from tests import clocks

Cost = Callable[[int, int], float]

POLICY = GoodputLength()
GREEDY, DRAWN = Sampling(temperature=0, seed=0), Sampling(temperature=1, seed=0)


def cost(draft: float, token: float, jump: float = 0.0) -> Cost:
    """Cost of a step: `draft` per drafter call and `token` per verified token of a request, of a plain step."""
    return lambda b, n: (1 + 0.04 * (b - 1)) * (1 + n * (draft + token * b) + jump * (n > 0))


def running(count: int, sampling: Sampling = GREEDY, *, repeats: bool = False, context: int = 64) -> list[Running]:
    """Requests that have just begun."""
    prompt = (1,) * context
    return [
        Running(
            request=Request(id=str(i), prompt=prompt, max_new_tokens=500, sampling=sampling, repeats=repeats),
            tokens=list(prompt),
            slot=i,
            drafter=None,
            length_state=POLICY.open(),
        )
        for i in range(count)
    ]


def accepting(costs: Cost | CostTable, rate: float, steps: int = 400, seed: int = 0) -> Experience:
    """The experience of an engine with these costs, whose drafts were accepted at this rate."""
    found, random = Experience(costs if isinstance(costs, CostTable) else CostTable.of_formula(costs)), rng(seed)
    for name in ("greedy", "sampled"):
        pool = Counts()
        for _ in range(steps):
            pool = pool.after([step(POLICY.most, accepted_of(random, rate, POLICY.most), 1)])
        setattr(found, name, pool)
    return found


def pool_of(rate: float) -> Counts:
    """Counts of many drafts whose tokens were accepted at this rate."""
    return Counts(tested=(400.0,) * 9, accepted=(400.0, *[400.0 * rate] * 8))


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def accepted_of(random: np.random.Generator, rate: float, drafted: int) -> int:
    return int(np.argmin(np.append(random.random(drafted) < rate, False)))


def lengths(experience: Experience, states: list[Running]) -> list[int]:
    return list(POLICY.choose(experience, states, [POLICY.most] * len(states)).lengths)


def settled(experience: Experience, states: list[Running]) -> list[int]:
    """The lengths after a few choices, of which nothing new was learnt."""
    for _ in range(12):
        choice = POLICY.choose(experience, states, [POLICY.most] * len(states))
        experience.state = choice.state
    return list(choice.lengths)


def best(cost: Cost, rate: float, requests: int) -> int:
    """The length of the most tokens per cost, by the formula."""
    return max(range(9), key=lambda n: tokens_by_length([rate] * n)[-1] / cost(requests, n))


@pytest.mark.parametrize("requests", [1, 2, 8])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("costs", [cost(0.15, 0.02), cost(0.02, 0.15, 0.3), cost(0.6, 0.3)])
def test_the_choice_is_within_two_percent_of_the_best_length_or_plain_where_that_gains_little(costs, rate, requests):
    chosen = settled(accepting(costs, rate), running(requests))
    assert len(set(chosen)) == 1

    def rates(n: int) -> float:
        return tokens_by_length([rate] * n)[-1] / costs(requests, n)

    most = rates(best(costs, rate, requests))
    plain = chosen[0] == 0 and most < 1.02 * (1 + CostTable.of_formula(costs).margin) * rates(0)
    assert plain or rates(chosen[0]) > 0.98 * most, (chosen, best(costs, rate, requests))


def drafts_with_seeds(costs: Cost, requests: int, accepts: bool, steps: int = 48) -> list[int]:
    """How many drafts each of some requests with a seed makes, all of which are accepted or rejected."""
    experience, states = Experience(CostTable.of_formula(costs)), running(requests, DRAWN, repeats=True)
    made = [0] * requests
    for _ in range(steps):
        choice = POLICY.choose(experience, states, [POLICY.most] * requests)
        experience.state = choice.state
        for i, length in enumerate(choice.lengths):
            made[i] += length > 0
            own = POLICY.update(states[i].length_state, step(length, length * accepts, requests, room=length))
            states[i] = replace(states[i], length_state=own)
    return made


def test_a_request_with_a_seed_soon_gives_up_drafts_that_all_fail():
    alone = drafts_with_seeds(cost(0.4, 0.03), 1, accepts=False)
    assert 0 < alone[0] <= HOLD
    assert drafts_with_seeds(cost(0.4, 0.03), 1, accepts=True) == [48]


def test_requests_with_seeds_learn_from_each_other():
    alone = drafts_with_seeds(cost(0.15, 0.0), 1, accepts=False)
    together = drafts_with_seeds(cost(0.15, 0.0), 4, accepts=False)
    assert max(together) < alone[0], "four drafts that fail say more than one"


def test_a_single_request_with_good_acceptance_drafts_far_and_a_full_batch_with_poor_acceptance_not_at_all():
    costs = cost(0.1, 0.03)
    assert settled(accepting(costs, 0.9), running(1))[0] >= 5
    assert settled(accepting(costs, 0.3), running(8)) == [0] * 8
    found = [settled(accepting(costs, 0.7), running(b))[0] for b in range(1, 9)]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]


def known(count: int, rate: float, drafts: int = 60) -> list[Running]:
    """Requests whose own drafts were accepted at this rate."""
    states, random = running(count), rng(1)
    for state in states:
        for _ in range(drafts):
            made = step(POLICY.most, accepted_of(random, rate, POLICY.most), count)
            state.length_state = POLICY.update(state.length_state, made)
    return states


def test_costs_that_are_doubtful_need_a_larger_gain():
    costs = CostTable.of_formula(cost(0.45, 0.0))
    gain = max(tokens_by_length([0.7] * n)[-1] / cost(0.45, 0.0)(1, n) for n in range(1, 9))
    doubtful = replace(costs, doubt=0.25)
    assert 1 + costs.margin < gain < 1 + doubtful.margin
    assert settled(accepting(costs, 0.7), known(1, 0.7))[0] > 0
    assert settled(accepting(doubtful, 0.7), known(1, 0.7)) == [0]


NOISE = np.exp(0.17 * np.random.default_rng(7).normal(size=(10, 2)))


def two_rows(noise: np.ndarray, *, doubt: float) -> CostTable:
    """A short measurement of a slow pair: a plain step of 78 ms, and one with four draft tokens of 30 ms each."""
    plain = StepCost(requests=1, length=0, target=0.078 * noise[0])
    drafted = StepCost(requests=1, length=4, target=0.084 * noise[1], drafter=0.12 * noise[1])
    return CostTable(rows=(plain, drafted), catch_up=0.0003, doubt=doubt, kept=True)


def drafted_steps(table: CostTable, accepts: float, *, repeats: bool, tokens: int = 64) -> tuple[int, float]:
    """How many steps of a request draft, and its speed over plain decoding, both by the table without noise."""
    experience, random, true = Experience(table), rng(0), two_rows(np.ones(2), doubt=0.0)
    [state] = running(1, DRAWN if repeats else GREEDY, repeats=repeats, context=8)
    state.request = replace(state.request, max_new_tokens=tokens)
    drafting, emitted, seconds = 0, 0, 0.0
    while emitted < tokens:
        choice = POLICY.choose(experience, [state], [max(0, tokens - emitted - 1)])
        [length] = choice.lengths
        made = step(length, accepted_of(random, accepts, length), 1, room=length)
        state.length_state = POLICY.update(state.length_state, made)
        state.tokens.extend(made.tokens)
        experience.note(choice, [state.request], [made])
        seconds += true.steps(1, sampled=False, context=8, longest=16)[1][length]
        drafting, emitted = drafting + (length > 0), emitted + len(made.tokens)
    plain = true.steps(1, sampled=False, context=8, longest=8)[0][0]
    return drafting, emitted * plain / seconds


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("doubt", [0.04, 0.17, 0.3])
def test_a_pair_that_was_never_tried_is_tried_in_its_first_request(doubt, repeats):
    found = [drafted_steps(two_rows(noise, doubt=doubt), 1.0, repeats=repeats) for noise in NOISE]
    assert min(drafting for drafting, _ in found) > 0, found
    assert statistics.median(speed for _, speed in found) > (1.5 if doubt < 0.2 else 1.0), found


def drafting_of_a_short_request(draft: float, tried: Counts | None = None, doubt: float = 0.08) -> bool:
    """Whether a request of few tokens drafts, where a draft token costs so much of a plain step, and reading too."""
    table = CostTable.of_formula(lambda requests, length: 1 + draft * length)
    experience, [state] = Experience(replace(table, catch_up=0.15, doubt=doubt)), running(1, context=5)
    experience.greedy, state.request = tried or Counts(), replace(state.request, max_new_tokens=32)
    return lengths(experience, [state]) != [0]


def test_a_pair_that_was_never_tried_is_tried_where_errors_of_the_costs_may_hide_a_gain():
    assert drafting_of_a_short_request(0.81)
    assert drafting_of_a_short_request(1.15, doubt=0.12)
    assert not drafting_of_a_short_request(1.5)
    assert not drafting_of_a_short_request(0.81, tried=pool_of(0.3))


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("doubt", [0.04, 0.17])
def test_to_try_a_pair_of_which_nothing_is_accepted_costs_a_few_percent_once(doubt, repeats):
    found = [drafted_steps(two_rows(noise, doubt=doubt), 0.0, repeats=repeats) for noise in NOISE]
    assert statistics.median(speed for _, speed in found) > 0.92, found
    long = [drafted_steps(two_rows(noise, doubt=doubt), 0.0, repeats=repeats, tokens=1000) for noise in NOISE]
    assert statistics.median(speed for _, speed in long) > 0.97, long


def test_where_drafts_stay_off_the_policy_says_why():
    table = CostTable.of_formula(cost(1.2, 0.0))
    experience = accepting(replace(table, doubt=0.17), 0.1)
    assert POLICY.why_plain(experience) == "no step had room for a draft"
    assert settled(experience, running(1)) == [0]
    said = POLICY.why_plain(experience)
    assert said.startswith(
        "drafts would have to gain 28%, because the costs of this machine are uncertain, and seem to"
    )
    assert "% of draft tokens were accepted so far" in said
    assert said.endswith("measure again with `outrider prepare`")
    sure = accepting(table, 0.1)
    settled(sure, running(1))
    assert "gain 7% and seem to lose" in POLICY.why_plain(sure)
    assert "prepare" not in POLICY.why_plain(sure)
    seldom = finding(cost(0.3, 0.3), 0.5, 0.1)
    settled(seldom, running(1))
    assert "found a draft in 10% of the steps" in POLICY.why_plain(seldom)
    # A token that was tested long ago counts less than one.
    once = Experience(table)
    once.greedy = Counts().after([step(1, 1, 1, room=1)])
    for _ in range(50):
        once.greedy = once.greedy.after([])
    settled(once, running(1))
    assert "100% of draft tokens were accepted so far" in POLICY.why_plain(once)


def test_what_drafts_seem_to_gain_leaves_out_what_the_drafter_must_read_first():
    """A request whose drafter has read nothing yet has more to read with each token; drafts get no slower by it."""

    def said(draft: float) -> str:
        table = replace(CostTable.of_formula(cost(draft, 0.0)), catch_up=0.5)
        experience = accepting(table, 0.9)
        assert settled(experience, running(1, context=4000)) == [0]
        return POLICY.why_plain(experience)

    # A draft of one token brings 1.9 at the cost of two plain steps.
    assert re.search("drafts would have to gain 7% and seem to lose [56]%", said(1.0))
    assert said(0.1).startswith("to read the text first would take the drafter longer than drafts gain (90% of draft")
    # Reading is no reason where drafts are made again, or have no room.
    nothing_to_read = accepting(cost(0.1, 0.0), 0.9)
    assert settled(nothing_to_read, running(1)) != [0]
    assert POLICY.why_plain(nothing_to_read).endswith("% of draft tokens were accepted so far")
    assert "read" not in POLICY.why_plain(nothing_to_read)
    nothing_to_read.state = replace(nothing_to_read.state, rooms=[0], lengths=[0])
    assert "read" not in POLICY.why_plain(nothing_to_read)


def test_the_longest_draft_is_a_setting_and_rooms_bound_it():
    free = accepting(cost(0.0, 0.001), 0.99)
    for most in (1, 3, 8, 16):
        assert GoodputLength(most=most).choose(free, running(1), [20]).lengths == [most]
    assert POLICY.choose(free, running(3), [2, 0, 20]).lengths == [2, 0, 16]


def test_costs_that_are_not_known_give_a_fixed_length():
    assert POLICY.choose(Experience(), running(2), [3, 9]).lengths == [3, 5]
    assert GoodputLength(fallback=0).choose(Experience(), running(1), [9]).lengths == [0]


def test_a_request_that_accepts_nothing_stops_while_its_neighbours_go_on():
    # The drafter's time grows with its requests.
    rows = [
        StepCost(requests=b, length=n, target=1 + 0.01 * b * n, drafter=0.03 * b * n) for b in (1, 4) for n in range(9)
    ]
    experience, states = accepting(CostTable(rows=tuple(rows)), 0.7), running(4)
    assert min(settled(experience, states)) > 2
    for _ in range(20):
        states[1].length_state = POLICY.update(states[1].length_state, step(4, 0, 4))
    chosen = settled(experience, states)
    assert chosen[1] == 0
    assert min(chosen[0], chosen[2], chosen[3]) > 2
    # Its evidence fades.
    for _ in range(600):
        states[1].length_state = POLICY.update(states[1].length_state, step(0, 0, 4))
    assert min(settled(experience, states)) > 2


def finding(costs: Cost, rate: float, hits: float) -> Experience:
    """The experience of an engine whose drafter found a draft so often, and whose drafts were accepted at this rate."""
    found = accepting(costs, rate)
    for name in ("greedy", "sampled"):
        pool = getattr(found, name)
        asked = max(400.0, pool.tested[1] / hits)
        changed = Counts(tested=(asked, *pool.tested[1:]), accepted=(hits * asked, *pool.accepted[1:]))
        setattr(found, name, changed)
    return found


def test_a_drafter_that_seldom_finds_a_draft_drafts_for_a_request_alone_and_not_for_a_batch():
    # Rows are padded to the longest draft, so that one of eight drafts costs what eight cost.
    costs = cost(0.02, 0.02)
    assert min(settled(finding(costs, 0.8, 1.0), running(8))) > 0
    assert settled(finding(costs, 0.8, 0.2), running(8)) == [0] * 8
    assert settled(finding(costs, 0.8, 0.2), running(1))[0] > 4


@pytest.mark.parametrize("alone", [0.0, 0.7, 1.0], ids=["no padding", "some", "padded"])
def test_expected_tokens_and_costs_of_a_step_are_those_of_a_simulated_lookup(alone):
    """One draft costs the forward `alone` of what three cost, above a third, and asking costs what it costs."""
    random, rate, hits, ask = rng(0), 0.8, 0.3, 0.05
    rows = [StepCost(requests=b, length=n, target=2 + 0.08 * b * n, drafter=ask * b) for b in (1, 3) for n in (0, 4)]
    rows = [replace(row, drafter=0.0) if row.length == 0 else row for row in rows]
    one = StepCost(requests=3, length=4, drafting=1, target=2 + 0.96 * (1 + 2 * alone) / 3)
    table = CostTable(rows=(*rows, one))

    def forward(found: int) -> float:
        return 2 + (0.96 * (found + (3 - found) * alone) / 3 if found else 0)

    tokens = np.array([[1 + hits * (n - 1) for n in tokens_by_length([rate] * 4)]] * 3)
    tokens[:, 1:4] = 1.0  # Drafts of four are the best.
    known = {"deviations": 0 * tokens, "common": np.zeros(3), "unknown": np.zeros(3)}
    worth = ExpectedTokens(tokens=tokens, hits=np.full(3, hits), **known)
    steps = table.steps(3, sampled=False, context=64, longest=4)
    missed = np.array([2 + ask * asking for asking in range(4)])
    plan = _best(_Prices(steps=steps, missed=missed, margin=0.0), worth, [0.0] * 3)
    emitted, spent, asking = 0.0, 0.0, 3
    assert plan.lengths == [4] * 3
    for _ in range(20000):
        found = random.random(3) < hits
        emitted += sum(1 + accepted_of(random, rate, 4) for hit in found if hit) + sum(~found)
        spent += forward(sum(found)) + ask * asking
    assert 1 + plan.gain == pytest.approx(emitted / 3 / (spent / 2), rel=0.01)


def test_a_drafter_that_may_find_nothing_is_doubted_before_it_was_asked():
    costs = CostTable.of_formula(cost(0.02, 0.02))
    for drafter, drafts in ((None, True), (SuffixDrafter(), False)):
        for repeats in (False, True):
            states = running(8, DRAWN, repeats=repeats)
            for state in states:
                state.drafter = drafter
            # Longer than drafts that are made to learn alone.
            assert (max(settled(Experience(costs), states)) > 1) == drafts
            assert any(settled(Experience(costs), states[:1]))


def test_what_looking_for_a_draft_takes_can_be_more_than_it_gains():
    rows = [StepCost(requests=1, length=n, target=1.0, drafter=0.6 * (n > 0)) for n in range(9)]
    dear = CostTable(rows=tuple(rows))
    assert dear.missed(1, sampled=False, context=64) == pytest.approx([1.0, 1.6])
    for hits, drafts in ((1.0, True), (0.05, False)):
        experience = finding(cost(0.0, 0.0), 0.8, hits)
        experience.costs = dear
        assert any(settled(experience, running(1))) == drafts


def test_a_request_that_never_finds_a_draft_stops_while_its_neighbours_go_on():
    rows = [
        StepCost(requests=b, length=n, target=1 + 0.01 * b * n, drafter=0.03 * b * n) for b in (1, 4) for n in range(9)
    ]
    experience, states = accepting(CostTable(rows=tuple(rows)), 0.7), running(4)
    for _ in range(60):
        states[2].length_state = POLICY.update(states[2].length_state, step(0, 0, 4, room=4))
    chosen = settled(experience, states)
    assert chosen[2] == 0
    assert min(chosen[0], chosen[1], chosen[3]) > 2
    # Steps in which it was not asked say nothing.
    states[2].length_state = POLICY.open()
    for _ in range(60):
        states[2].length_state = POLICY.update(states[2].length_state, step(0, 0, 4))
    assert min(settled(experience, states)) > 2


def test_a_long_context_can_turn_drafts_into_a_loss():
    near = [StepCost(requests=1, length=n, target=1 + 0.02 * n, drafter=0.1 * n) for n in range(9)]
    far = [replace(row, context=512, drafter=10 * row.drafter) for row in near if row.length in (0, 8)]
    experience = accepting(CostTable(rows=(*near, *far)), 0.6)
    assert settled(experience, running(1))[0] > 0
    experience.state = PolicyState()
    assert settled(experience, running(1, context=512)) == [0]


def test_a_new_engine_drafts_unless_no_likely_acceptance_gains():
    for draft, drafts in ((0.4, True), (0.7, True), (3.0, False)):
        assert any(lengths(Experience(CostTable.of_formula(cost(draft, 0.0))), running(2))) == drafts


@pytest.mark.parametrize("repeats", [False, True])
def test_what_the_drafter_has_to_read_first_counts_for_each_token_that_may_follow(repeats):
    table = replace(CostTable.of_formula(cost(0.4, 0.0)), catch_up=0.05)
    for most, drafts in ((20, False), (500, True)):
        experience, states = accepting(table, 0.7), running(2, DRAWN if repeats else GREEDY, repeats=repeats)
        for state in states:
            state.request = replace(state.request, max_new_tokens=most)
        assert all(length > 0 for length in settled(experience, states)) == drafts
        # Who has drafted needs not read it again.
        for state in states:
            state.length_state = POLICY.update(state.length_state, step(3, 3, 2))
        assert all(length > 0 for length in settled(experience, states))


def test_a_choice_holds_for_some_steps_of_the_same_requests():
    experience, states = accepting(cost(0.15, 0.02), 0.8), running(2)
    first = POLICY.choose(experience, states, [8, 8])
    experience.state = first.state
    experience.greedy = pool_of(0.0)
    for _ in range(HOLD - 1):
        choice = POLICY.choose(experience, states, [8, 8])
        assert choice.lengths == first.lengths
        assert lengths(experience, states[:1]) != list(first.lengths[:1])
        experience.state = choice.state
    assert lengths(experience, states) != list(first.lengths)


@pytest.mark.parametrize(("rate", "drafts"), [(0.8, True), (0.1, False)])
def test_a_choice_holds_while_its_drafts_fit_and_no_room_grows(rate, drafts):
    experience, states = accepting(cost(0.15, 0.02), rate), running(2)
    settled(experience, states)
    experience.state = replace(experience.state, ids=())
    first = POLICY.choose(experience, states, [6, 6])
    assert any(first.lengths) == drafts
    experience.state = replace(first.state, age=1)
    experience.greedy = pool_of(float(not drafts))
    for rooms, holds in (([6, 6], True), ([max(1, length) for length in first.lengths], True), ([6, 7], False)):
        assert (POLICY.choose(experience, states, rooms).lengths == first.lengths) == holds
    if drafts:
        assert POLICY.choose(experience, states, [first.lengths[0] - 1, 6]).lengths != first.lengths


def tries(table: CostTable, steps: int = 4000) -> list[int]:
    """Lengths of the drafts of an engine whose drafts all fail, after many that failed."""
    experience, states, found = accepting(table, 0.0), running(1), []
    for _ in range(steps):
        choice = POLICY.choose(experience, states, [8])
        [length] = choice.lengths
        experience.note(choice, [states[0].request], [step(length, 0, 1)])
        found.append(length)
    return found[steps // 2 :]


def test_while_drafts_fail_one_token_now_and_then_costs_half_a_percent():
    found = tries(CostTable.of_formula(cost(0.3, 0.1)))
    assert set(found) == {0, 1}
    assert 0.001 < sum(found) * 0.4 / len(found) <= 0.0055


def test_a_drafter_that_must_catch_up_is_tried_less_often():
    table = CostTable.of_formula(cost(0.3, 0.1))
    often, seldom = (sum(map(bool, tries(replace(table, catch_up=catch_up)))) for catch_up in (0.0, 0.05))
    assert 0 < seldom < often / 2


def test_a_choice_changes_nothing():
    experience, states = accepting(cost(0.15, 0.02), 0.6), running(2)
    before = (experience.state, experience.greedy, experience.num_steps)
    assert POLICY.choose(experience, states, [8, 8]) == POLICY.choose(experience, states, [8, 8])
    assert (experience.state, experience.greedy, experience.num_steps) == before


def test_seconds_of_steps_decide_nothing():
    def chosen(seconds: Callable[[int], float]) -> list[list[int]]:
        experience, states, random, found = Experience(CostTable.of_formula(cost(0.3, 0.05))), running(2), rng(3), []
        for number in range(400):
            choice = POLICY.choose(experience, states, [8, 8])
            made = [step(n, accepted_of(random, 0.5, n), 2) for n in choice.lengths]
            for state, each in zip(states, made, strict=True):
                state.length_state = POLICY.update(state.length_state, each)
            experience.note(choice, [state.request for state in states], made, seconds(number))
            found.append(list(choice.lengths))
        return found

    wild = rng(0).lognormal(size=400)
    assert chosen(lambda i: 1.0) == chosen(lambda i: 1000.0 * wild[i])


@pytest.mark.parametrize(("factor", "off"), [(1.0, False), (1.3, False), (2.5, True), (0.5, True)])
def test_costs_that_are_off_as_a_whole_are_noticed(factor, off, monkeypatch):
    experience, states, random = Experience(CostTable.of_formula(cost(0.15, 0.02))), running(1), rng(0)
    monkeypatch.setattr("outrider.lengths.experience.PAUSE", -1.0)
    for _ in range(200):
        choice = POLICY.choose(experience, states, [8])
        [length] = choice.lengths
        seconds = factor * cost(0.15, 0.02)(1, length) * (20 if random.random() < 0.1 else 1)
        experience.note(choice, [states[0].request], [step(length, 0, 1)], seconds)
    assert experience.stale == off
    assert not experience.with_costs(experience.costs).stale


def test_a_request_with_a_seed_reads_its_own_acceptance_and_nothing_pooled():
    costs = CostTable.of_formula(cost(0.15, 0.05))
    fresh, good, bad = Experience(costs), accepting(costs, 0.99), accepting(costs, 0.01)
    good.state, bad.state = PolicyState(gain=0.5), PolicyState(gain=-0.2)
    states = running(3, DRAWN, repeats=True)
    first = lengths(fresh, states)
    assert min(first) > 0
    assert first == lengths(good, states) == lengths(bad, states)
    for _ in range(30):
        states[0].length_state = POLICY.update(states[0].length_state, step(4, 0, 1))
    assert lengths(good, states[:1]) == [0]
    for _ in range(30):
        states[1].length_state = POLICY.update(states[1].length_state, step(8, 8, 1))
    assert lengths(bad, states[1:2])[0] > first[1]
    assert lengths(accepting(costs, 0.01), running(3, DRAWN)) != first


def test_a_request_with_a_seed_begins_where_a_gain_is_likely_and_stops_only_where_it_is_not():
    experience = Experience(CostTable.of_formula(cost(0.15, 0.05)))
    [state] = running(1, DRAWN, repeats=True)
    assert lengths(experience, [state]) != [0]
    drafted = []
    for _ in range(40):
        state.length_state = POLICY.update(state.length_state, step(1, 0, 1))
        drafted.append(lengths(experience, [state]) != [0])
    failures = drafted.index(False)
    assert 2 <= failures <= 15
    assert not any(drafted[failures:])
    # To learn more would cost more than it may.
    dear = Experience(CostTable.of_formula(cost(2.0, 0.2)))
    assert lengths(dear, running(1, DRAWN, repeats=True)) == [0]


def test_requests_with_a_seed_draft_a_fixed_length_by_costs_that_are_not_kept():
    table = replace(CostTable.of_formula(cost(9.0, 0.0)), kept=False)
    states = running(2, DRAWN, repeats=True)
    assert lengths(accepting(table, 0.5), states) == [5, 5]
    assert settled(accepting(table, 0.5), running(2, DRAWN)) == [0, 0]


def test_acceptance_is_kept_for_the_next_process_and_damaged_one_is_left_out(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    costs, states = CostTable.of_formula(cost(0.15, 0.02)), running(3)
    with clocks.running():
        first = Experience.recalled(costs, {"pair": 1})
        for _ in range(60):
            choice = POLICY.choose(first, states, [8] * 3)
            made = [step(2, 1, 3, room=2), step(2, 1, 3, room=2), step(0, 0, 3, room=2)]
            first.note(choice, [state.request for state in states], made)
        assert first.greedy.accepted[0] == pytest.approx(2 / 3 * first.greedy.tested[0])
        first.save()
        second = Experience.recalled(costs, {"pair": 1})
        assert second.greedy.tested == pytest.approx([MOST_RECALLED] * 3)
        assert second.greedy.accepted == pytest.approx([2 / 3 * MOST_RECALLED, MOST_RECALLED, 0.0])
        assert second.sampled == Counts() == Experience.recalled(costs, {"pair": 2}).greedy
        for tested, accepted in ([[2.0], ["x"]], [[1.0], [2.0]], [[1.0], [-1.0]], [[1.0], []], [None, None]):
            damaged = {"tested": tested, "accepted": accepted, "promised": []}
            remembered.write(RECORD, {"pair": 1}, {"greedy": damaged, "sampled": damaged})
            assert Experience.recalled(costs, {"pair": 1}).greedy == Counts()
        for promised in ([3.0], [-1.0], [1.0, 1.0]):
            damaged = {"tested": [2.0], "accepted": [1.0], "promised": promised}
            remembered.write(RECORD, {"pair": 1}, {"greedy": damaged, "sampled": damaged})
            assert Experience.recalled(costs, {"pair": 1}).greedy == Counts()


@pytest.mark.parametrize("fields", [{"most": 0}, {"fallback": -1}])
def test_impossible_fields_are_refused(fields):
    with pytest.raises(InputError):
        GoodputLength(**fields)


def world(gain: float, requests: int, **fields) -> World:
    return World(**{"shape": "line", "kind": "even", "gain": gain, "requests": requests, "tokens": 128} | fields)


def test_a_simulated_fixed_length_has_the_speed_that_its_world_says():
    made = world(0.25, 3)
    assert max(simulate(made, Lengths(n), 0).speed for n in range(1, 9)) == pytest.approx(1.25, abs=1e-3)
    assert simulate(made, Lengths(0), 0).speed == pytest.approx(1.0)


@pytest.mark.parametrize("way", ["fresh", "kept", "seeded"])
def test_in_simulated_engines_the_regret_is_small(way):
    rows = [judged(world(gain, b, kind="differing"), 3, way) for gain in (-0.2, 0.0, 0.25) for b in (1, 8)]
    found = [(row["gain"], row["requests"], round(row["regret"], 3)) for row in rows if row["regret"] > 0.045]
    assert not found, found
    assert statistics.mean(row["regret"] for row in rows) < 0.02


def test_costs_that_are_off_by_a_tenth_cost_a_few_percent():
    rows = [judged(world(gain, 3, table_error=0.1), 4, "fresh") for gain in (-0.08, 0.08, 0.8)]
    assert statistics.mean(row["regret"] for row in rows) < 0.06


def test_the_policy_finds_out_when_drafts_begin_to_pay():
    bad, good = world(-0.08, 3), world(0.8, 3)
    assert learnt(bad, 2, "kept")[-1].drafted < 0.2
    assert learnt(good, 4, "fresh")[-1].speed > 1.6
