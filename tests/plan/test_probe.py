"""The probe makes real steps of every kind, leaves nothing behind, and times what it says that it times."""

from dataclasses import replace

import pytest

from outrider.decoding.protocol import Parts
from outrider.drafters.none import NoDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.lengths.costs import CostTable
from outrider.plan import probe
from outrider.plan.probe import Bench, Kind, measure
from tests.world.models import engine, free_slots

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
    assert kinds == {(b, n, False) for b in (1, 2, 3) for n in (0, 1, 4)} | drawn
    assert all(row.target > 0 and row.rest > 0 and row.drafter >= 0 for row in found.rows)
    assert not found.kept
    assert (found.catch_up > 0) <= (drafter == "model")
    free = free_slots(used)
    assert set(free) == {8}


def test_each_step_emits_one_token_whatever_is_accepted():
    bench = Bench(parts_of("model"), 32)
    for number, kind in enumerate([Kind(requests=2, length=4), Kind(requests=1, length=0), Kind(requests=2, length=1)]):
        assert bench.step(kind) is not None
        assert len(bench.states[0].tokens) == 33 + number
    assert len(bench.states[1].tokens) == 34
    for state in bench.states:
        assert state.tokens == [bench.text[i % 16] for i in range(len(state.tokens))]
    bench.close()


def test_the_target_runs_once_per_step_and_the_draft_model_once_per_token():
    parts = parts_of("model")
    bench = Bench(parts, 32)
    bench.step(Kind(requests=2, length=3))
    for length in (0, 1, 3):
        before = parts.target.num_forwards, parts.drafter.lm.num_forwards
        bench.step(Kind(requests=2, length=length))
        after = parts.target.num_forwards, parts.drafter.lm.num_forwards
        assert (after[0] - before[0], after[1] - before[1]) == (1, length)
    bench.close()


def test_contexts_do_not_grow_without_end():
    bench = Bench(parts_of("ngram"), 32)
    for _ in range(70):
        assert bench.step(Kind(requests=2, length=2)) is not None
        assert all(32 < len(state.tokens) <= 64 for state in bench.states)
    bench.close()


def test_a_step_for_which_there_is_no_room_is_not_measured():
    bench = Bench(parts_of("ngram"), 250)
    assert bench.step(Kind(requests=1, length=8)) is None
    assert bench.step(Kind(requests=1, length=1)) is not None
    bench.close()


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
    assert near == {(b, n, drawn) for b in (1, 2) for n in range(9) for drawn in (False, True)}
    assert [(row.requests, row.length) for row in found.rows if row.context == 100] == [(1, 0), (1, 8), (2, 0), (2, 8)]
