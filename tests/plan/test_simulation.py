"""Simulated loads agree with what is known of queues and of plain decoding; many requests take few events."""

import pytest

from outrider.core.types import InputError
from outrider.lengths.costs import CostTable
from outrider.plan.prediction import Planner
from outrider.plan.simulation import simulate
from outrider.plan.ways import DraftConfiguration
from tests.plan.test_prediction import chains, example

FLAT = CostTable.of_formula(lambda requests, length: 0.01)


def planner_of(acceptance: float, costs: CostTable = FLAT) -> Planner:
    return Planner(record=example(acceptance), costs={"model": costs})


def test_a_lonely_request_takes_its_steps():
    found = simulate(planner_of(0.5), DraftConfiguration(), rate=1e-6, slots=4, requests=50)
    assert found.e2e.p50 == pytest.approx(20 * 0.01, rel=1e-6)
    assert found.ttft.p50 == pytest.approx(0.01, rel=1e-6)
    assert found.tpot.p50 == pytest.approx(0.01, rel=1e-6)
    assert found.mean_running == pytest.approx(1.0)
    assert found.keeps_up


def test_drafts_save_the_steps_that_the_record_says():
    planner, way = planner_of(0.8), chains()[4]
    found = simulate(planner, way, rate=0.01, slots=1, requests=2000)
    steps = sum(each.by_length.sum() for each in planner.steps(way)) / 8
    mean = (found.e2e.p50 + found.e2e.p50) / 2
    assert mean == pytest.approx(steps * 0.01, rel=0.15)


def test_requests_in_steps_are_rate_times_time():
    # Little's law.
    found = simulate(planner_of(0.5), DraftConfiguration(), rate=10, slots=64, requests=4000)
    assert found.keeps_up
    busy = found.requests_per_second * 0.2
    assert busy == pytest.approx(2.0, rel=0.1)
    assert found.mean_running == pytest.approx(busy / (1 - 2.718281828**-busy), rel=0.15)


def test_too_many_requests_are_noticed_and_wait():
    found = simulate(planner_of(0.5), DraftConfiguration(), rate=1000, slots=4, requests=2000)
    assert not found.keeps_up
    assert found.requests_per_second == pytest.approx(4 / 0.2, rel=0.02)
    assert found.ttft.p99 > 10 * found.tpot.p99


def test_ten_thousand_requests_need_few_events(monkeypatch):
    counted = []
    heappop = __import__("heapq").heappop
    monkeypatch.setattr("outrider.plan.simulation.heapq.heappop", lambda heap: counted.append(1) or heappop(heap))
    simulate(planner_of(0.8), chains()[4], rate=30, slots=8, requests=10_000)
    # Other threads of this process may use heaps meanwhile.
    assert 10_000 <= len(counted) < 10_100


@pytest.mark.parametrize("wrong", [{"rate": 0.0}, {"rate": float("nan")}, {"slots": 0}, {"requests": 0}])
def test_loads_that_are_none_are_refused(wrong):
    with pytest.raises(InputError, match="above 0"):
        simulate(planner_of(0.5), DraftConfiguration(), **({"rate": 1.0, "slots": 1, "requests": 1} | wrong))
