"""Goodput drafts what pays by the costs that it has seen, nothing where nothing pays, and looks again now and then."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from outrider.core.types import InputError
from outrider.host import remembered
from outrider.lengths.costs import RECALLED, of_forwards
from outrider.lengths.experience import ALLOWANCE, TRIAL, Choice, Experience
from outrider.lengths.goodput import GoodputLength

Cost = Callable[[int, int], float]
pytestmark = pytest.mark.usefixtures("clocked")

POLICY = GoodputLength()


def cost(draft: float, token: float, jump: float = 0.0) -> Cost:
    """Cost of a step: `draft` per drafter call and `token` per verified token of a request, of a plain step."""
    return lambda b, n: (1 + 0.04 * (b - 1)) * (1 + n * (draft + token * b) + jump * (n > 0))


def knowing(cost: Cost, requests: range = range(1, 9), *, clocked: bool = False) -> Experience:
    """An engine's experience that has seen these costs. Its reserve for trials is spent."""
    found = Experience(clocked=clocked)
    for b in requests:
        for n in range(POLICY.most + 1):
            found.costs.set(b, n, cost(b, n))
    found.credit = 0.0
    return found


def accepting(experience: Experience, rate: float, steps: int = 400, seed: int = 0) -> Experience:
    """The same after steps of drafts whose tokens were accepted at this rate."""
    random, most = np.random.default_rng(seed), POLICY.most
    for _ in range(steps):
        accepted = int(np.argmin(np.append(random.random(most) < rate, False)))
        experience.note(Choice(length=most, usual=most), [most], [accepted], 0.0)
    experience.credit = 0.0
    return experience


def best(cost: Cost, rate: float, requests: int) -> int:
    """The length of the most tokens per cost, by the formula."""
    return max(range(9), key=lambda n: sum(rate**i for i in range(n + 1)) / cost(requests, n))


@pytest.mark.parametrize("requests", [1, 2, 8])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("costs", [cost(0.15, 0.02), cost(0.02, 0.15, 0.3), cost(0.6, 0.3)])
def test_the_choice_is_within_two_percent_of_the_best_length(costs, rate, requests):
    chosen = POLICY.choose(accepting(knowing(costs), rate), requests).usual

    def rates(n: int) -> float:
        return sum(rate**i for i in range(n + 1)) / costs(requests, n)

    assert rates(chosen) > 0.98 * rates(best(costs, rate, requests)), (chosen, best(costs, rate, requests))


def test_a_single_request_with_good_acceptance_drafts_far_and_a_full_batch_with_poor_acceptance_not_at_all():
    costs = cost(0.1, 0.03)
    assert POLICY.choose(accepting(knowing(costs), 0.9), 1).length >= 5
    assert POLICY.choose(accepting(knowing(costs), 0.3), 8).length == 0
    lengths = [POLICY.choose(accepting(knowing(costs), 0.7), b).length for b in range(1, 9)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1]


def test_drafts_begin_again_only_where_they_pay_by_the_margin():
    even = accepting(knowing(cost(0.55, 0.0)), 0.58)
    gain = max(t / c for t, c in zip(even.tokens(8)[1:], even.costs.table(1, 8)[1:], strict=True)) - 1
    assert 0 < gain < POLICY.margin
    assert POLICY.choose(even, 1).usual > 0
    even.resting = True
    assert POLICY.choose(even, 1).usual == 0
    assert GoodputLength(margin=0).choose(even, 1).usual > 0


def test_the_longest_draft_is_a_setting():
    free = accepting(knowing(cost(0.0, 0.001)), 0.99)
    for most in (1, 3, 8):
        assert GoodputLength(most=most).choose(free, 1).usual == most


@dataclass(kw_only=True)
class Simulated:
    """An engine whose steps take made-up time.

    Attributes:
        spent: Cost of all steps, in plain steps' units.
        emitted: Expected tokens of all steps, per request.
    """

    cost: Cost
    rate: float
    noise: float = 0.05
    spikes: float = 0.01
    catching_up: float = 0.0
    slowness: Callable[[int], float] = lambda step: 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.experience = Experience()
        self.lengths: list[int] = []
        self.trials: list[bool] = []
        self.behind = 0
        self.spent = self.worth = 0.0

    def run(self, requests: int, steps: int) -> float:
        """Speed over plain decoding, of these steps alone: what plain steps for the same tokens cost, over the cost."""
        self.spent = self.worth = 0.0
        for _ in range(steps):
            choice = POLICY.choose(self.experience, requests)
            n = choice.length
            accepted = [int(np.argmin(np.append(self.random.random(n) < self.rate, False))) for _ in range(requests)]
            cost = self.cost(requests, n) + (self.catching_up * min(self.behind, 300) * requests if n else 0.0)
            self.behind = 0 if n else self.behind + 1
            noise = math.exp(self.noise * self.random.standard_normal()) * (
                3 if self.random.random() < self.spikes else 1
            )
            seconds = 0.01 * cost * noise * self.slowness(len(self.lengths))
            self.experience.note(choice, [n] * requests, accepted, seconds)
            self.lengths.append(n)
            self.trials.append(choice.trial)
            self.spent += cost
            self.worth += sum(self.rate**i for i in range(n + 1)) * self.cost(requests, 0)
        return self.worth / self.spent


NEVER_PAYS = {
    "draft model, full batch": (cost(0.14, 0.15, 0.2), 0.5, 8, 0.007),
    "draft model, just below": (cost(0.14, 0.06), 0.6, 8, 0.007),
    "suffix, full batch": (cost(0.01, 0.12, 0.25), 0.2, 8, 0.0),
    "large draft model, alone": (cost(0.8, 0.1), 0.4, 1, 0.007),
}


@pytest.mark.parametrize("name", NEVER_PAYS)
def test_where_drafts_do_not_pay_speed_is_that_of_plain_decoding_within_two_percent(name):
    costs, rate, requests, catching_up = NEVER_PAYS[name]
    assert best(costs, rate, requests) == 0
    speeds = []
    for seed in range(3):
        engine = Simulated(cost=costs, rate=rate, catching_up=catching_up, seed=seed)
        engine.run(requests, 500)
        speeds.append(engine.run(requests, 2000))
    assert min(speeds) > 0.975, speeds
    assert sum(speeds) / 3 > 0.98, speeds


def test_where_drafts_pay_nearly_all_of_their_gain_is_had():
    costs = cost(0.15, 0.02)
    bound = sum(0.7**i for i in range(best(costs, 0.7, 1) + 1)) / costs(1, best(costs, 0.7, 1))
    engine = Simulated(cost=costs, rate=0.7)
    engine.run(1, 300)
    assert engine.run(1, 1500) > 0.97 * bound


def test_a_machine_whose_speed_changes_threefold_does_not_mislead():
    for costs, rate, requests in ((cost(0.15, 0.02), 0.7, 1), (cost(0.3, 0.1, 0.2), 0.4, 8)):
        steady, shaky = (
            Simulated(cost=costs, rate=rate, slowness=slowness)
            for slowness in (lambda step: 1.0, lambda step: 1 + 2 * (step % 400) / 400)
        )
        for engine in (steady, shaky):
            engine.run(requests, 400)
        assert shaky.run(requests, 1600) > 0.97 * steady.run(requests, 1600)


def test_the_policy_finds_out_when_drafts_begin_to_pay():
    engine = Simulated(cost=cost(0.15, 0.02), rate=0.05)
    assert engine.run(1, 400) < 1.01
    assert engine.lengths[-50:].count(0) > 40
    engine.rate = 0.8
    engine.run(1, 1500)
    assert engine.run(1, 300) > 1.5


def test_drafts_that_seem_far_too_dear_are_tried_all_the_same():
    """Something else took the cores while their costs were learnt."""
    costs = cost(0.15, 0.02)
    engine = Simulated(cost=costs, rate=0.8)
    for n in range(9):
        engine.experience.costs.set(1, n, costs(1, n) * (60 if n else 1))
    assert engine.run(1, 500) < 1.01
    engine.run(1, 3500)
    assert engine.run(1, 300) > 1.5


def test_trials_take_no_more_than_their_share_of_the_time():
    engine = Simulated(cost=cost(0.2, 0.1), rate=0.3, noise=0.0, spikes=0.0)
    engine.run(4, 500)
    before = len(engine.trials)
    lost = 1 - engine.run(4, 6000)
    assert 0.2 * ALLOWANCE < lost < 1.2 * ALLOWANCE
    runs = "".join("t" if trial else "." for trial in engine.trials[before:]).split(".")
    assert all(len(run) % TRIAL == 0 for run in runs)


def test_the_first_step_of_a_kind_may_take_any_time():
    """It may compile something."""

    class Compiling(Simulated):
        def run(self, requests: int, steps: int) -> float:
            seen: set[int] = set()

            def slow(step: int) -> float:
                n = POLICY.choose(self.experience, requests).length
                return 1.0 if n in seen or seen.add(n) else 5000.0

            self.slowness = slow
            return super().run(requests, steps)

    engine = Compiling(cost=cost(0.15, 0.02), rate=0.8, noise=0.0, spikes=0.0)
    engine.run(1, 300)
    assert sum(engine.lengths[-100:]) / 100 > 2


def test_steps_with_prefill_teach_no_costs_but_acceptance():
    told = knowing(cost(0.15, 0.02), clocked=True)
    before = told.costs.rows()
    for _ in range(50):
        told.note(Choice(length=3, usual=3), [3, 3], [0, 0], 1e6, ordinary=False)
    assert told.costs.rows() == before
    assert told.tokens(3)[3] < 1.1


def test_a_request_without_room_counts_for_no_acceptance():
    told = Experience()
    for _ in range(100):
        told.note(Choice(length=2, usual=2), [2, 0], [2, 0], 0.01)
    assert told.tokens(2)[2] > 2.9


def test_what_an_engine_has_learnt_belongs_to_it_alone():
    one, other = Experience(), Experience()
    for _ in range(40):
        one.note(POLICY.choose(one, 8), [4] * 8, [0] * 8, 0.01)
    assert other.tokens(4) == Experience().tokens(4)
    assert other.costs.rows() == []
    assert POLICY.choose(other, 8) == GoodputLength().choose(Experience(), 8)


def test_a_choice_changes_nothing():
    told = knowing(cost(0.15, 0.02))
    told.credit = 100.0
    assert POLICY.choose(told, 2) == POLICY.choose(told, 2)
    assert POLICY.choose(told, 2).trial


def test_costs_are_kept_for_the_next_process_and_damaged_ones_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    busy = [False]
    monkeypatch.setattr("outrider.lengths.experience.crowded", lambda *_: busy[0])
    first = POLICY.recalled({"pair": 1})
    for _ in range(60):
        first.note(Choice(length=2, usual=2), [2] * 3, [1] * 3, 0.02)
    second = POLICY.recalled({"pair": 1})
    assert {row[:2] for row in second.costs.rows()} == {(3, 2)}
    assert second.costs.table(3, 2)[2] == pytest.approx(first.costs.table(3, 2)[2])
    assert POLICY.recalled({"pair": 2}).costs.rows() == []
    for costs in ([[0, 1, 1.0, 4]], [[1, 1, -1.0, 4]], [[1, 1]], "text", [[1, "x", 1.0, 4]], [[1, 1, None, 4]]):
        remembered.write("step-costs", {"pair": 1}, {"catching_up": 0.0, "costs": costs})
        assert POLICY.recalled({"pair": 1}).costs.rows() == []
    busy[0] = True
    first.save()
    assert POLICY.recalled({"pair": 1}).costs.rows() == []


def test_a_kept_cost_that_is_far_from_the_others_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    # Plain steps of one request seemed to cost next to nothing, because those before them were disturbed.
    costs = [[1, 0, 0.067, 3], [1, 4, 4.05, 3], [3, 4, 6.85, 1], [8, 0, 2.5, 4], [8, 4, 10.0, 1]]
    remembered.write("step-costs", {"pair": 1}, {"catching_up": 2.0, "costs": costs})
    forwards = ((4.0, 4.0), (0.3, 0.3))
    found = POLICY.recalled({"pair": 1}, forwards)
    assert {row[:2] for row in found.costs.rows()} == {(1, 4), (3, 4), (8, 0), (8, 4)}
    assert POLICY.choose(found, 1).usual > 0


@pytest.mark.parametrize("fields", [{"most": 0}, {"margin": -0.1}])
def test_impossible_fields_are_refused(fields):
    with pytest.raises(InputError):
        GoodputLength(**fields)


def test_measured_forwards_say_what_pays_before_any_step():
    # Six tokens cost the target twice as much as one: a draft pays alone and not among eight.
    steep = Experience(formula=of_forwards((3.5, 7.5), (0.8, 1.8)))
    assert POLICY.choose(steep, 1).usual > 0
    assert POLICY.choose(steep, 8).usual == 0
    # A block costs as much as a token: it pays among eight too.
    flat = Experience(formula=of_forwards((3.5, 3.5), (0.8, 0.8)))
    assert POLICY.choose(flat, 8).usual > 0
    # The unit does not matter.
    measured = of_forwards((3.5, 7.5), (0.8, 1.8))
    scaled = Experience(formula=lambda kind: 7 + measured(kind))
    assert all(POLICY.choose(scaled, n).length == POLICY.choose(steep, n).length for n in (1, 3, 8))


def test_plain_steps_are_tried_once_for_each_number_of_requests_and_nothing_is_charged():
    costs = cost(0.05, 0.01)
    experience = accepting(knowing(costs, clocked=True), 0.9)
    # What another process has learnt, at a busy hour.
    experience.costs.set(3, 0, 4 * costs(3, 0), count=RECALLED)
    for requests in (3, 5):
        lengths, before = [], experience.credit
        for _ in range(10):
            choice = POLICY.choose(experience, requests)
            lengths.append(choice.length)
            assert choice.usual > 0
            rooms = [choice.length] * requests
            experience.note(choice, rooms, rooms, 0.01 * costs(requests, choice.length))
        first = lengths.index(0)
        assert first > 0
        assert lengths[first : first + TRIAL] == [0] * TRIAL
        assert 0 not in lengths[first + TRIAL :]
        assert experience.credit >= before
    assert experience.costs.table(3, 1)[0] == pytest.approx(costs(3, 0), rel=0.5)
