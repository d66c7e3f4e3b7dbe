"""Measurements of a tiny pair: the gate, turns, rows that go on, exact counts, and what is told of them."""

import json
import re
import weakref
from dataclasses import dataclass, replace

import numpy as np
import pytest

from outrider import InputError, Sampling, Setup
from outrider.assembly import assemble
from outrider.bench.evidence import IntervalEstimate
from outrider.bench.side_by_side.arrivals import ClosedLoop, OpenLoop, Trace
from outrider.bench.side_by_side.configuration import DEFAULT, PLAIN, Configuration, named
from outrider.bench.side_by_side.export import profile, write_profile
from outrider.bench.side_by_side.metrics import Objectives
from outrider.bench.side_by_side.page import TRAPS, findings, summary
from outrider.bench.side_by_side.peers import PeerOptions
from outrider.bench.side_by_side.served import Served
from outrider.bench.side_by_side.session import (
    BenchPlan,
    Group,
    Measurement,
    SessionClock,
    groups_of,
    measure,
    shared_setup,
)
from outrider.bench.side_by_side.verdict import SpeedupVerdict, chief, headline, units, verdict_of
from outrider.bench.turns import Turn
from outrider.bench.workloads.conversation import Conversation
from outrider.bench.workloads.formats import TraceUnits
from outrider.core.dice import Purpose
from outrider.engine.engine import Engine
from outrider.engine.generation import Generation
from outrider.verifiers.protocol import chains, everyone, recover
from outrider.verifiers.token import TokenVerifier
from tests.world.models import drafter_of, llama

TOKENS = 12
ALONE = PeerOptions(names=())


@dataclass(frozen=True, kw_only=True)
class Generous(TokenVerifier):
    """Accepts a third more often than it may; greedy texts do not show it."""

    def verify(self, draft, target_rows, dice):
        side = chains(draft, target_rows)
        ratios, num_accepted = side.ratios, np.zeros_like(side.lengths)
        for i in range(side.depth):
            chance = np.minimum(4 / 3 * ratios[:, i], 1) * (num_accepted == i)
            num_accepted += (num_accepted == i) & dice.accept(chance, everyone(draft, i, Purpose.ACCEPT))
        last, rejected = side.roots + num_accepted, num_accepted < side.lengths
        return side.verdict(num_accepted, recover(draft, dice, target_rows, last, rejected))


@dataclass(frozen=True, kw_only=True)
class Forgetful(TokenVerifier):
    """Draws twice with one coin, which the enumeration refuses."""

    def verify(self, draft, target_rows, dice):
        super().verify(draft, target_rows, dice)
        return super().verify(draft, target_rows, dice)


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """A tiny pair on a trace of ten requests with shared beginnings."""
    place = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    lines = [
        {"timestamp": 10 * i, "input_length": 20 + i, "output_length": TOKENS, "hash_ids": [i % 2]} for i in range(10)
    ]
    place.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return BenchPlan(
        setup=Setup(llama(), drafter=drafter_of("model"), length="fixed:3", ignore_generation_config=True),
        configurations=(named("three", {}), named("two", {"length": "fixed:2"})),
        generation=Generation(max_new_tokens=TOKENS, sampling=Sampling(temperature=0), ignore_eos=True),
        workload=str(place),
        units=TraceUnits(block=8),
        num_prompts=None,
        rounds=2,
    )


@pytest.fixture(scope="module")
def measured(plan, tmp_path_factory):
    """The folder of a whole measurement, and what it found."""
    place = tmp_path_factory.mktemp("bench") / "out"
    made = replace(plan, out=place, objectives=Objectives(e2el=1e6))
    return place, measure(made, finish=lambda found, folder: folder.write(findings(found), rows_inside=True) and None)


def test_slots_and_context_are_what_the_workload_needs(plan):
    named_by_hand = replace(plan, setup=Setup(max_slots=5, max_context=77))
    assert (shared_setup(named_by_hand, 200).max_slots, shared_setup(named_by_hand, 200).max_context) == (5, 77)
    three = replace(plan, loads=(ClosedLoop(), ClosedLoop(concurrency=3)))
    assert (shared_setup(three, 200).max_slots, shared_setup(three, 200).max_context) == (3, 200)
    # How many requests a rate brings together is not known.
    assert shared_setup(replace(plan, loads=(OpenLoop(rate=1.0, seed=0),)), 200).max_slots == 8


def test_no_configuration_is_stopped_by_memory_that_its_workload_does_not_need(plan, monkeypatch):
    # Enough for one slot of 1,024 tokens, and for one slot of each copy in float32.
    monkeypatch.setattr("outrider.lm.slots.budget.free_bytes", lambda device: 10**6)
    half = Setup(llama(context=1 << 17).bfloat16(), drafter="suffix", length="fixed:3", ignore_generation_config=True)
    with pytest.raises(InputError, match="GB free memory"):
        assemble(replace(half, max_context=1 << 17))
    configurations = (DEFAULT, named("other", {"drafter": "ngram"}))
    found = measure(replace(plan, setup=half, configurations=configurations, rounds=1, num_prompts=1, peers=ALONE))
    assert found.stopped == {}
    assert found.ways == [PLAIN, "default", "other"]


def test_plain_decoding_keeps_slots_warm_as_configurations_do(plan, monkeypatch):
    kept, plain = [], Engine.plain
    monkeypatch.setattr(Engine, "plain", lambda self, **named: kept.append(named) or plain(self, **named))
    measure(plan)
    assert {"keep_warm": True} in kept


def test_the_memory_of_the_copies_that_the_gate_made_is_given_back_before_anything_is_measured(plan, monkeypatch):
    class Copy:
        pass

    made, alive = [], []

    def passed(engine, time_limit, copies):
        copies.append(Copy())
        made.append(weakref.ref(copies[-1]))
        return "checked"

    monkeypatch.setattr("outrider.bench.side_by_side.session.passed", passed)
    monkeypatch.setattr(
        "outrider.bench.side_by_side.session.release_heap", lambda: alive.append([each() is not None for each in made])
    )
    monkeypatch.setattr("outrider.bench.side_by_side.session._warm_up", lambda *given: alive.append("the first run"))
    measure(plan)
    assert made
    assert alive[:2] == [[False] * len(made), "the first run"]


def test_all_ways_answer_all_requests_with_as_many_tokens(measured):
    _, found = measured
    assert found.ways == [PLAIN, "three", "two", "transformers"]
    assert len(found.rows) == 4 * 10 * 2
    assert {row["tokens"] for row in found.rows} == {TOKENS}
    assert {each["num_tokens"] for row in found.rows for each in row["served"]} == {TOKENS}
    assert (found.stopped, found.left_out) == ({}, {})


def test_rows_say_what_each_step_drafted_and_accepted(measured):
    _, found = measured
    for row in found.rows:
        [request] = [Served.read(each) for each in row["served"]]
        longest = {PLAIN: 0, "three": 3, "two": 2}.get(row["method"])
        if longest is None:
            assert request.steps == ()
            continue
        assert sum(step.emitted for step in request.steps) == TOKENS
        assert max(step.drafted for step in request.steps) == longest
        assert all(step.accepted <= step.drafted for step in request.steps)
        assert all(step.emitted <= step.accepted + 1 for step in request.steps)
        assert row["parts"]["target"] > 0


def test_figures_of_a_way_fit_each_other(measured):
    _, found = measured
    own = {each["way"]: each for each in summary(found)}
    assert own[PLAIN]["block_efficiency"] == 1
    assert own[PLAIN]["acceptance_length"] is None
    three = own["three"]
    assert three["acceptance_length"] == pytest.approx(1 + sum(three["marginal_acceptance"]))
    assert three["block_efficiency"] > own["two"]["block_efficiency"] > 1
    assert own["transformers"]["tpot"] is None
    assert own["transformers"]["e2el"]["mean"] > 0
    assert three["goodput"] == pytest.approx(three["request_throughput"])


def test_throughputs_have_the_speedup_as_their_quotient_and_one_slow_round_changes_neither(measured):
    _, found = measured
    first = [{**row, "round": n} for n in range(3) for row in found.rows if row["round"] == 0]

    def told(rows):
        ways = {each["way"]: each for each in summary(replace(found, rows=rows))}
        three = ways["three"]
        return three["output_throughput"], ways[three["baseline"]]["output_throughput"], three["speedup"]

    three, plain, speedup = told(first)
    assert three / plain == pytest.approx(speedup[0])
    slow = [{**row, "seconds": row["seconds"] * (10 if row["round"] == 1 else 1)} for row in first]
    assert told(slow) == (three, plain, speedup)


def test_a_second_run_takes_no_turn_again_and_a_larger_one_goes_on(plan, measured):
    place, found = measured
    rows = (place / "rows.jsonl").read_text()
    told = []
    again = measure(replace(plan, out=place), tell=told.append)
    assert (place / "rows.jsonl").read_text() == rows
    assert again.rows == found.rows == told
    more = measure(replace(plan, out=place, configurations=(*plan.configurations, named("one", {"length": "fixed:1"}))))
    assert len(more.rows) == len(found.rows) + 20


def test_rows_of_other_prompts_or_versions_are_not_merged(plan, measured, monkeypatch):
    place, _ = measured
    with pytest.raises(InputError, match=r"a run with another token_ids_sha256"):
        measure(replace(plan, out=place, num_prompts=3))
    monkeypatch.setattr("outrider.__version__", "9.9")
    with pytest.raises(InputError, match=r"a run with another versions"):
        measure(replace(plan, out=place))


def test_the_page_holds_verdict_figures_and_all_rows_and_asks_no_network(measured):
    place, found = measured
    page = (place / "report.html").read_text()
    assert headline(found) in page
    assert page.count("<figure>") == page.count("<svg") == 5
    assert TRAPS[2] in page
    rows = page.split('type="application/x-ndjson">')[1].split("</script>")[0].replace("<\\/", "</")
    assert [json.loads(line) for line in rows.splitlines()] == found.rows
    assert re.findall(r'(?:src|href)="(http[^"]*)"', page) == []
    markdown = (place / "table.md").read_text()
    assert markdown.startswith(f"**{headline(found)}**")


def test_the_verdict_names_another_engine_that_is_faster(measured):
    _, found = measured
    assert "It is the fastest of" in headline(quickened(found, chief(found).way))
    told = headline(quickened(found, "transformers"))
    assert f"The fastest of {len(found.ways)} ways is transformers: " in told
    assert told.startswith(chief(found).way)


def quickened(found: Measurement, way: str) -> Measurement:
    """The same measurement, had this way been a thousand times as fast, in a process of its own if it is no ours."""
    rows = [{**row, "seconds": row["seconds"] / 1000} if row["method"] == way else row for row in found.rows]
    return replace(found, rows=rows, outside={"transformers"})


def test_an_error_in_the_enumeration_stops_one_configuration_with_one_sentence(plan):
    broken = Configuration(name="broken", options={"verifier": Forgetful(), "allow_lossy": True})
    found = measure(replace(plan, configurations=(broken, *plan.configurations[1:]), num_prompts=1, rounds=1))
    assert list(found.stopped) == ["broken"]
    assert found.stopped["broken"].startswith(
        "its law cannot be enumerated on small tables: it ended with RuntimeError: "
    )
    assert "two" in found.ways


def test_a_biased_configuration_is_stopped_and_the_others_go_on(plan):
    biased = Configuration(name="biased", options={"verifier": Generous(), "allow_lossy": True})
    found = measure(replace(plan, configurations=(biased, *plan.configurations[1:]), num_prompts=1, rounds=1))
    assert list(found.stopped) == ["biased"]
    assert found.stopped["biased"].startswith("its law is not the target's: enumerated on small tables, it is off by")
    assert "biased" not in found.ways
    assert {row["method"] for row in found.rows} == {PLAIN, "two", "transformers"}
    assert "biased" in findings(found).markdown("outrider bench", found.circumstances)


def test_a_point_that_does_not_fit_is_left_out_and_a_named_one_is_refused(plan):
    wide = {"tree": "iid:2", "verifier": "block"}
    found = measure(
        replace(
            plan,
            configurations=(named("wide", wide, swept=True),),
            num_prompts=1,
            rounds=1,
            peers=PeerOptions(names=()),
        )
    )
    assert found.ways == [PLAIN]
    assert "does not keep the target's law" in found.left_out["wide"]
    assert headline(found).startswith("Nothing was measured that drafts")
    with pytest.raises(InputError, match=r"^wide: verifier 'block' does not keep"):
        measure(replace(plan, configurations=(named("wide", wide),)))


def test_a_drafter_that_is_nowhere_is_told_before_the_target_is_read(plan, monkeypatch, tmp_path):
    monkeypatch.setattr("outrider.bench.side_by_side.session.assemble", None)
    nowhere = named("small", {"drafter": f"model:path={tmp_path / 'nowhere'}"})
    with pytest.raises(InputError, match=r"^small: there is no directory .*nowhere"):
        measure(replace(plan, configurations=(nowhere,)))


def test_requests_at_a_rate_and_as_the_trace_says(plan):
    loads = (ClosedLoop(concurrency=3), OpenLoop(rate=200.0), Trace(speed=2.0))
    found = measure(replace(plan, loads=loads, configurations=plan.configurations[:1], rounds=1))
    # Ten conversations, three at once: one turn of nine and the tenth.
    counts = {
        name: [row["requests"] for row in found.rows if row["load"] == name] for name in {r["load"] for r in found.rows}
    }
    assert counts["concurrency 3"] == [10] * 3
    assert counts["200 per second"] == counts["trace, 2 times as fast"] == [10] * 2
    assert found.left_out == {
        f"transformers, {load.name}": "it answers batches, and cannot be sent requests while it runs"
        for load in loads[1:]
    }
    arrivals = [each["arrived"] for row in found.rows if row["load"].startswith("trace") for each in row["served"]]
    assert sorted(arrivals) == pytest.approx(sorted([0.005 * i for i in range(10)] * 2), abs=1e-6)
    page = findings(found)
    titles = [panel.title for panel in page.panels]
    assert {"Throughput against arrival rate", "TPOT against arrival rate", "TTFT against arrival rate"} <= set(titles)
    blocks = units([row for row in found.rows if row["load"] == "200 per second"])
    assert sum(row["tokens"] for row in blocks) == 2 * 10 * TOKENS
    assert verdict_of(found, "three", "200 per second").num_units > 1


def test_the_acceptance_of_the_fastest_configuration_is_exported(measured, tmp_path):
    _, found = measured
    write_profile(found, tmp_path / "below" / "profile.json")
    told = json.loads((tmp_path / "below" / "profile.json").read_text())
    best = chief(found)
    assert told["method"] == best.way
    assert told["num_speculative_tokens"] == len(told["synthetic_acceptance_rates"]) == {"three": 3, "two": 2}[best.way]
    rates = told["synthetic_acceptance_rates"]
    assert rates == sorted(rates, reverse=True)
    assert told["mean_accept_length"] == pytest.approx(1 + sum(rates))
    assert sum(told["acceptance_length_histogram"].values()) > 0
    assert told["measurement_conditions"]["num_samples"] == 20
    nothing = replace(found.plan, configurations=())
    with pytest.raises(InputError, match="no configuration drafted anything"):
        profile(replace(found, plan=nothing))


def verdict(value: float, low: float, high: float, num_units: int = 9) -> SpeedupVerdict:
    speedup = IntervalEstimate(value=value, low=low, high=high)
    return SpeedupVerdict(way="mine", load="concurrency 1", baseline=PLAIN, speedup=speedup, num_units=num_units)


def test_a_verdict_needs_its_whole_interval_beyond_the_bounds():
    assert verdict(1.2, 1.03, 1.4).word == "faster"
    assert verdict(1.2, 1.01, 1.4).word == "no difference found"
    assert verdict(0.9, 0.85, 0.97).word == "slower"
    assert verdict(0.9, 0.85, 0.99).word == "no difference found"
    assert verdict(2.0, 1.9, 2.1, num_units=7).word == "too few to judge"
    assert verdict(1.0, 0.85, 1.1).sentence().endswith("could have seen a difference of 20 % or more.")


def test_time_ends_between_groups(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("outrider.bench.side_by_side.session.time.monotonic", lambda: now[0])
    clock = SessionClock(10.0)
    one, two = (Group(number=i, conversations=(Conversation(id=str(i), category="", opening=[1]),)) for i in range(2))

    def allowed(group, round=0):
        return clock.allows(Turn(round=round, way=one, job=group))

    assert allowed(one)
    now[0] = 11.0
    assert allowed(one)
    assert not allowed(two)
    assert not allowed(one, round=1)


def test_groups_hold_every_conversation_once():
    asked = [Conversation(id=str(i), category="a", opening=[1]) for i in range(10)]
    for load, alone, sizes in (
        (ClosedLoop(), False, [1] * 10),
        (ClosedLoop(concurrency=2), False, [10]),
        (ClosedLoop(concurrency=1), True, [1] * 10),
        (ClosedLoop(concurrency=4), True, [4, 4]),
        (OpenLoop(rate=1.0), False, [10]),
    ):
        groups = groups_of(asked, load, alone=alone)
        assert [len(each.conversations) for each in groups] == sizes, load
        assert len({each.name for each in groups}) == len(groups)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"configurations": (named("a", {}), named("a", {}))}, "two configurations are called 'a'"),
        ({"rounds": 0}, "rounds must be >= 1, got 0"),
        ({"time_limit": 0.0}, "time_limit must be > 0"),
        ({"loads": ()}, "needs a load"),
    ],
)
def test_plans_that_make_no_sense_are_refused(given, sentence):
    with pytest.raises(InputError, match=sentence):
        BenchPlan(**given)
