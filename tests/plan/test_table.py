"""Costs are measured once, kept per machine, models and methods, and measured again when they turn out to be wrong."""

from dataclasses import replace

import pytest

import outrider
from outrider.core.types import Request, Running, Sampling
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.host import remembered
from outrider.lengths.acceptance import Counts
from outrider.lengths.costs import CostTable
from outrider.lengths.experience import Experience
from outrider.lengths.goodput import GoodputLength
from outrider.plan import table
from outrider.plan.table import RECORD, costs_of, experience_of, key_of, measured_again, read
from recipes.length_simulation import step
from tests import clocks
from tests.world.models import engine, llama

COSTS = CostTable.of_formula(lambda requests, length: requests + 0.5 * length)


@pytest.fixture
def asked(tmp_path, monkeypatch) -> list[int]:
    """For how many requests each measurement was made."""
    found: list[int] = []

    def measure(parts, *, max_requests, thorough=False):
        found.append(max_requests)
        return replace(COSTS, kept=False)

    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(table, "measure", measure)
    return found


def test_costs_are_measured_once(asked):
    parts = engine("ngram").parts
    first = costs_of(parts, max_slots=8, probe=True)
    assert first == replace(COSTS, kept=True)
    assert costs_of(engine("ngram").parts, max_slots=8, probe=True) == first
    assert costs_of(parts, max_slots=2, probe=False) == first
    assert asked == [8]


def test_costs_of_fewer_requests_are_measured_again(asked):
    parts = engine("ngram").parts
    for slots in (1, 8, 2, 8):
        costs_of(parts, max_slots=slots, probe=True)
    assert asked == [1, 8]


def test_an_engine_of_many_slots_has_a_table_of_its_own(asked):
    parts = engine("ngram", max_slots=64).parts
    for slots in (8, 64, 8, 32, 64):
        costs_of(parts, max_slots=slots, probe=True)
    assert asked == [8, 16]


def test_costs_of_too_much_doubt_are_measured_again_thoroughly(asked, monkeypatch):
    calls: list[bool] = []

    def measure(parts, *, max_requests, thorough=False):
        calls.append(thorough)
        return replace(COSTS, kept=False, doubt=0.02 if thorough else 0.1)

    monkeypatch.setattr(table, "measure", measure)
    parts = engine("ngram").parts
    assert costs_of(parts, max_slots=8, probe=True).doubt == 0.1
    assert costs_of(parts, max_slots=8, probe=True, most_doubt=0.05).doubt == 0.02
    assert costs_of(parts, max_slots=8, probe=True, most_doubt=0.05).doubt == 0.02
    assert calls == [False, True]


def test_uncertain_costs_are_measured_again_after_a_while_and_the_two_measurements_are_combined(asked, monkeypatch):
    doubts, now = [0.17, 0.13, 0.13, 0.5], [1000.0]

    def measure(parts, *, max_requests, thorough=False):
        asked.append(max_requests)
        return replace(COSTS, kept=False, doubt=doubts[len(asked) - 1], measured=now[0])

    monkeypatch.setattr(table, "measure", measure)
    monkeypatch.setattr(table.time, "time", lambda: now[0])
    parts = engine("ngram").parts
    found = []
    for now[0] in (1000.0, 1001.0, 1601.0, 1602.0, 2300.0, 9000.0):
        found.append(round(costs_of(parts, max_slots=8, probe=True).doubt, 3))
        assert costs_of(parts, max_slots=8, probe=False).doubt == pytest.approx(found[-1], abs=1e-3)
    assert found == [0.17, 0.17, 0.103, 0.103, 0.081, 0.081]
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("token_costs", "accepted", "measured", "drafting"),
    [
        ([1.4], True, 3, [False] * 4),
        ([1.4, 0.1], True, 2, [True] * 4),
        ([0.1], True, 1, [True] * 4),
        ([0.6], False, 1, [False] * 4),
    ],
)
def test_costs_by_which_accepted_drafts_lose_are_measured_again_by_the_next_processes(
    asked, monkeypatch, token_costs, accepted, measured, drafting
):
    """A process in a bad moment kept costs by which drafts lose; no later one drafted, though all were accepted.

    Args:
        token_costs: What a draft token costs, as a share of a plain step, in each measurement.
    """
    tables = [CostTable.of_formula(lambda _, length, each=each: 1 + each * length) for each in token_costs]
    policy, drafted = GoodputLength(), list[int]()

    def measure(parts, *, max_requests, thorough=False):
        asked.append(max_requests)
        return replace(tables[min(len(asked), len(tables)) - 1], doubt=0.04, kept=False)

    with clocks.running():
        monkeypatch.setattr(table, "measure", measure)
        for _ in range(5):
            experience = experience_of(engine("model").parts, max_slots=1, probe=True)
            assert experience.costs is not None
            assert experience.costs.measurements == len(asked)
            request = Request(id="r", prompt=(1,), max_new_tokens=64, sampling=Sampling(temperature=0, seed=0))
            drafted.append(0)
            for _ in range(24):
                state = Running(request=request, tokens=[1], slot=0, drafter=None, length_state=Counts())
                choice = policy.choose(experience, [state], [4])
                [n] = choice.lengths
                experience.note(choice, [request], [step(n, accepted * n, 1, room=4)])
                drafted[-1] += n
            experience.save()
    assert [each > 0 for each in drafted[1:]] == drafting
    assert len(asked) == measured


def test_costs_of_a_busy_machine_replace_no_kept_ones(asked, monkeypatch):
    parts = engine("ngram").parts
    monkeypatch.setattr(table, "measure", lambda parts, **_: replace(COSTS, kept=False, doubt=0.2, measured=0.0))
    first = costs_of(parts, max_slots=8, probe=True)
    monkeypatch.setattr(table, "measure", lambda parts, **_: replace(COSTS, kept=False, busy=True))
    assert costs_of(parts, max_slots=8, probe=True) == first


def test_an_engine_measures_uncertain_costs_again_when_it_is_idle(monkeypatch):
    monkeypatch.setattr("outrider.lengths.experience.PAUSE", -1.0)
    assert Experience(replace(COSTS, doubt=0.17)).stale
    assert not Experience(replace(COSTS, doubt=0.07)).stale
    monkeypatch.setattr("outrider.lengths.experience.PAUSE", 600.0)
    assert not Experience(replace(COSTS, doubt=0.17)).stale


def test_without_a_probe_costs_are_those_that_are_kept(asked):
    parts = engine("ngram").parts
    assert costs_of(parts, max_slots=8, probe=False) is None
    assert experience_of(parts, max_slots=8, probe=False).costs is None
    assert asked == []


def test_costs_of_a_busy_machine_are_used_and_not_kept(asked, monkeypatch):
    monkeypatch.setattr(table, "measure", lambda parts, **_: replace(COSTS, kept=False, busy=True))
    parts = engine("ngram").parts
    found = costs_of(parts, max_slots=8, probe=True)
    assert found is not None
    assert not found.kept
    assert read(parts) is None
    old = replace(parts, experience=Experience(COSTS))
    assert measured_again(old, max_slots=8).costs is COSTS
    assert measured_again(parts, max_slots=8).costs == found


def test_costs_that_cannot_be_written_are_not_kept(asked, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", "/dev/null")
    found = costs_of(engine("ngram").parts, max_slots=8, probe=True)
    assert found == replace(COSTS, kept=False)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"max_requests": 8, "rows": [], "catch_up": 0.0},
        {"max_requests": 8, "rows": [{"requests": 1}], "catch_up": 0.0},
        {"max_requests": "many", "rows": [], "catch_up": 0.0},
        {"max_requests": 8, "rows": 3, "catch_up": 0.0},
        {"max_requests": 8, "rows": [dict.fromkeys(("requests", "length", "context"), "x")], "catch_up": 0.0},
    ],
)
def test_damaged_costs_count_as_none(asked, values):
    parts = engine("ngram").parts
    remembered.write(RECORD, key_of(parts), values)
    assert read(parts) is None


def test_costs_belong_to_shapes_drafters_and_verifiers(asked):
    parts = engine("ngram").parts
    assert key_of(parts) == key_of(engine(NgramDrafter(prompt_lookup_min=1)).parts)
    others = [engine(SuffixDrafter()), engine("model"), engine("ngram", "match")]
    keys = [str(key_of(each.parts)) for each in others]
    assert len({str(key_of(parts)), *keys}) == 4


def test_an_engine_measures_again_when_it_is_idle_and_its_costs_are_off(asked):
    used = outrider.load(llama(), drafter="ngram:prompt_lookup_min=1")
    assert asked == [8]
    sampling = Sampling(temperature=0, seed=0)
    used.generate([[5, 6, 5, 6]], max_new_tokens=4, sampling=sampling, ignore_eos=True)
    assert asked == [8]
    used.parts.experience._due = True
    used.add([5, 6, 5, 6], max_new_tokens=6, sampling=sampling, ignore_eos=True)
    acceptance = used.parts.experience.greedy.tested
    while used.busy:
        assert asked == [8]
        used.step()
    assert asked == [8, 8]
    assert not used.parts.experience.stale
    assert used.parts.experience.greedy.tested[0] > acceptance[0]


def test_another_kind_of_drafter_has_costs_of_its_own(asked):
    used = outrider.load(llama(), drafter="ngram:prompt_lookup_min=1")
    used.swap(SuffixDrafter())
    assert used.parts.experience.costs is None
    used.generate([[5, 6, 5, 6]], max_new_tokens=2, sampling=Sampling(temperature=0, seed=0))
    assert asked == [8, 8]
    assert used.parts.experience.costs is not None


def test_probe_is_an_option_of_loading(asked):
    used = outrider.load(llama(), drafter="ngram:prompt_lookup_min=1", probe=False)
    assert used.parts.experience.costs is None
    used.swap(SuffixDrafter())
    used.generate([[5, 6, 5, 6]], max_new_tokens=2, sampling=Sampling(temperature=0, seed=0))
    assert asked == []


def test_only_a_length_that_reads_costs_measures_them(asked):
    outrider.load(llama(), drafter="ngram", length="fixed:3")
    outrider.load(llama(), drafter="none")
    assert asked == []
