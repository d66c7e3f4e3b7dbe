"""The probe makes real steps of every kind, leaves nothing behind, and times what it says that it times."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from outrider.decoding.protocol import Parts
from outrider.decoding.step import StepDecoding
from outrider.drafters.model import ModelDrafter
from outrider.drafters.none import NoDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.lengths.costs import CostTable, StepCost
from outrider.lm.model import LanguageModel
from outrider.plan import probe
from outrider.plan.probe import Rounds, StepProbe, StepShape, Timed, measure
from tests.world.models import engine, free_slots, llama

DRAFTERS = {"model": "model", "ngram": "ngram", "suffix": SuffixDrafter()}


@pytest.fixture(autouse=True)
def few_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "WARM_UP", 1)
    monkeypatch.setattr(probe, "REPEATS", 2)
    monkeypatch.setattr(probe, "LENGTHS", (0, 1, 4))
    monkeypatch.setattr(probe, "SAMPLED", (0, 4))


def parts_of(drafter: str) -> Parts:
    return engine(DRAFTERS[drafter]).parts


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_kind_of_step_is_measured_and_all_slots_are_free_again(drafter):
    used = engine(DRAFTERS[drafter])
    found = measure(used.parts, max_requests=3, seconds=60)
    assert found is not None
    kinds = {(row.requests, row.length, row.sampled) for row in found.rows}
    drawn = {(b, n, True) for b in (1, 3) for n in (0, 4)}
    assert kinds == {(b, n, False) for b in (1, 3) for n in (0, 1, 4)} | drawn
    assert {(row.requests, row.length) for row in found.rows if row.drafting == 1} == {(3, 1), (3, 4)}
    assert found.doubt > 0
    assert found.unsteady >= 0
    assert all(row.target > 0 and row.rest > 0 and row.drafter >= 0 for row in found.rows)
    assert not found.kept
    assert (found.catch_up > 0) <= (drafter in ("model", "ngram", "suffix"))
    assert (found.looking is not None) == (drafter == "suffix")
    assert found.looking is None or 0 < found.looking < 0.1
    free = free_slots(used)
    assert set(free) == {8}


def test_each_step_of_a_drafter_that_looks_tokens_up_continues_the_periodic_text():
    bench = StepProbe(parts_of("ngram"), 32)
    for number, kind in enumerate(
        [StepShape(requests=2, length=4), StepShape(requests=1, length=0), StepShape(requests=2, length=1)]
    ):
        assert bench.step(kind) is not None
        assert len(bench.states[0].tokens) == 33 + number
    assert len(bench.states[1].tokens) == 34
    for state in bench.states:
        assert state.tokens == [bench.text[i % 16] for i in range(len(state.tokens))]
    bench.close()


def test_one_of_several_requests_drafts(monkeypatch):
    bench, drafted, step = StepProbe(parts_of("model"), 32), list[list[int]](), StepDecoding.step

    def stepped(*given, **named):
        made = step(*given, **named)
        drafted.append([each.num_draft_tokens for each in made])
        return made

    monkeypatch.setattr(StepDecoding, "step", stepped)
    for kind in (StepShape(requests=3, length=2, drafting=1), StepShape(requests=3, length=2)):
        cost = bench.step(kind)
        assert cost is not None
        assert cost.drafting == kind.drafting
    assert drafted == [[2, 0, 0], [2, 2, 2]]
    bench.close()


def test_requests_keep_what_is_accepted_up_to_a_number_that_changes():
    # The drafter is as good as the target, so that all greedy drafts are accepted.
    drafter = ModelDrafter(lm=LanguageModel(llama(), max_slots=8))
    bench = StepProbe(replace(parts_of("model"), drafter=drafter), 64)
    bench.step(StepShape(requests=2, length=3))
    grown, lacking = [], []
    for _ in range(8):
        before = [len(state.tokens) for state in bench.states]
        lacking.append(before[1] - drafter.lm.length(bench.states[1].drafter_state.slot))
        assert bench.step(StepShape(requests=2, length=3)) is not None
        grown.append(tuple(len(state.tokens) - count for state, count in zip(bench.states, before, strict=True)))
    assert grown == [(2, 3), (3, 4), (4, 1), (1, 2)] * 2
    # After a draft that was accepted as a whole, the drafter lacks two tokens instead of one.
    assert lacking == [1, 1, 2, 1, 1, 1, 2, 1]
    bench.close()


def test_the_target_runs_once_per_step_and_the_draft_model_once_per_token():
    parts = parts_of("model")
    bench = StepProbe(parts, 32)
    bench.step(StepShape(requests=2, length=3))
    for length in (0, 1, 3):
        before = parts.target.num_forwards, parts.drafter.lm.num_forwards
        bench.step(StepShape(requests=2, length=length))
        after = parts.target.num_forwards, parts.drafter.lm.num_forwards
        assert (after[0] - before[0], after[1] - before[1]) == (1, length)
    bench.close()


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_contexts_do_not_grow_without_end(drafter):
    parts = parts_of(drafter)
    bench = StepProbe(parts, 32)
    for _ in range(70):
        assert bench.step(StepShape(requests=2, length=2)) is not None
        assert all(32 < len(state.tokens) <= 64 + 2 for state in bench.states)
        assert all(parts.target.length(state.slot) == len(state.tokens) - 1 for state in bench.states)
    bench.close()


def test_a_step_for_which_there_is_no_room_is_not_measured():
    bench = StepProbe(parts_of("ngram"), 250)
    assert bench.step(StepShape(requests=1, length=8)) is None
    assert bench.step(StepShape(requests=1, length=1)) is not None
    bench.close()


SECONDS = {
    StepShape(requests=1, length=0): 1.0,
    StepShape(requests=1, length=4): 2.0,
    StepShape(requests=1, length=8): 3.0,
}


def rounds(slowness: list[float], disturbed: Mapping[tuple[int, int], float] | None = None) -> Rounds:
    """Rounds of steps whose costs are known, on a machine that is so slow in each; some steps are disturbed."""
    made = []
    for number, slow in enumerate(slowness):
        for kind, seconds in SECONDS.items():
            took = seconds * slow * (disturbed or {}).get((number, kind.length), 1.0)
            made.append(Timed(kind=kind, round=number, cost=StepCost(requests=1, length=kind.length, target=took)))
    return Rounds.of(made)


def over_plain(found: Rounds) -> dict[int, float]:
    costs = found.costs()
    plain = costs[StepShape(requests=1, length=0)].seconds
    return {kind.length: cost.seconds / plain for kind, cost in costs.items()}


def test_costs_are_told_from_how_slow_the_machine_was():
    swings = [1.0, 2.0, 1.7, 0.9, 1.3, 2.2, 1.1, 1.4]
    steady, swinging = rounds([1.0] * 8), rounds(swings)
    for found in (steady, swinging):
        assert over_plain(found) == pytest.approx({0: 1.0, 4: 2.0, 8: 3.0})
        assert found.doubt() == pytest.approx(0.0, abs=1e-9)
    assert steady.unsteady == pytest.approx(0.0, abs=1e-9)
    assert swinging.unsteady == pytest.approx(np.log(swings).std())


def test_single_disturbed_steps_move_no_cost_and_raise_the_doubt():
    disturbed = rounds([1.0, 2.0, 1.7, 0.9, 1.3], {(1, 4): 5.0, (3, 8): 4.0})
    assert over_plain(disturbed) == pytest.approx({0: 1.0, 4: 2.0, 8: 3.0})
    assert disturbed.doubt() > 0.05


def test_the_doubt_is_the_standard_error_of_a_quotient():
    rng = np.random.default_rng(0)
    said, errors = [], []
    for _ in range(200):
        noise = {(r, n): float(np.exp(rng.normal(0, 0.2))) for r in range(12) for n in (0, 4, 8)}
        found = rounds(np.exp(rng.normal(0, 0.3, 12)).tolist(), noise)
        said.append(found.doubt())
        errors.append(np.log(over_plain(found)[4] / 2.0))
    # With three kinds, some of the noise is taken for slowness.
    assert np.std(errors) == pytest.approx(np.median(said), rel=0.35)


def test_nothing_that_was_timed_costs_nothing():
    found = Rounds.of([])
    assert (found.costs(), found.doubt(), found.unsteady, found.unevenness) == ({}, 0.0, 0.0, 1.0)


def test_a_slow_model_gets_a_plain_step_and_a_draft():
    found = measure(parts_of("ngram"), max_requests=8, seconds=1e-9)
    assert found is not None
    assert {(row.requests, row.length) for row in found.rows} == {(1, 0), (1, 1)}
    assert isinstance(found, CostTable)


def test_a_drafter_that_proposes_nothing_has_no_costs():
    assert measure(replace(parts_of("ngram"), drafter=NoDrafter()), max_requests=1) is None


def test_a_busy_machine_is_told(monkeypatch):
    monkeypatch.setattr(probe, "crowded", lambda *_: True)
    found = measure(parts_of("ngram"), max_requests=1)
    assert found is not None
    assert found.busy


def test_a_thorough_probe_measures_all_lengths_at_both_temperatures_and_a_long_context(monkeypatch):
    monkeypatch.setattr(probe, "FAR", 100)
    found = measure(parts_of("model"), max_requests=2, thorough=True, seconds=60)
    assert found is not None
    near = {(row.requests, row.length, row.sampled) for row in found.rows if row.context == 64}
    assert near == {(b, n, drawn) for b in (1, 2) for n in probe.ALL_LENGTHS for drawn in (False, True)}
    far = [(row.requests, row.length) for row in found.rows if row.context == 100]
    assert sorted(far) == [(1, 0), (1, 16), (2, 0), (2, 16)]


class ChangingMachine:
    """Steps of known costs on a machine that is fast or two and a half times slower, for random spans of 0.3 s."""

    def __init__(self, seed: int) -> None:
        self.rng, self.now, self.until, self.slow = np.random.default_rng(seed), 0.0, 0.0, 1.0

    def step(self, kind: StepShape) -> StepCost:
        if self.now >= self.until:
            self.slow, self.until = float(self.rng.choice([1.0, 2.5])), self.now + self.rng.exponential(0.3)
        took = true_seconds(kind) * self.slow * float(np.exp(self.rng.normal(0, 0.05)))
        self.now += took
        return StepCost(requests=kind.requests, length=kind.length, sampled=kind.sampled, target=took)


def true_seconds(kind: StepShape) -> float:
    return 0.003 + 0.0005 * kind.requests * (1 + kind.length) + 0.0016 * kind.length


@pytest.mark.parametrize("thorough", [False, True])
def test_a_machine_of_changing_speed_changes_no_cost_over_a_plain_step(thorough, monkeypatch):
    kinds = probe._kinds([1, 2, 4, 8], 16, thorough)
    alone = [kind for kind in kinds if kind.requests == 1]
    for seed in range(10):
        machine = ChangingMachine(seed)
        monkeypatch.setattr(probe.time, "perf_counter", lambda machine=machine: machine.now)
        repeats = probe.MANY_REPEATS if thorough else 12
        costs = probe.repeated(machine, kinds, probe.THOROUGH if thorough else probe.SHORT, repeats).costs()
        plain = StepShape(requests=1, length=0)
        for kind in alone:
            beside = costs[kind].seconds / costs[plain].seconds
            assert beside == pytest.approx(true_seconds(kind) / true_seconds(plain), rel=0.25), (seed, kind)
