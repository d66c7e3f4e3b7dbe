"""Checks with little time say something true of fewer tokens, and draws go on while they tell nothing."""

from dataclasses import replace
from itertools import count

import pytest

import outrider
from outrider.bench.agreement import along_text, run_freely
from outrider.bench.doctor import measure
from outrider.core.deadline import ENDLESS, Deadline
from outrider.engine.engine import Engine
from outrider.host import remembered
from outrider.lm.model import LanguageModel
from outrider.proof import statistics
from outrider.proof.gate import Copies, gate, in_float32, openings
from outrider.proof.identity import LEAST_TOKENS, identity
from outrider.proof.nodes import compare_nodes
from outrider.proof.pair import repeated
from outrider.proof.statistics import LONGEST, SHORT, sampled_law
from tests.world.models import drafter_of, llama

pytestmark = pytest.mark.usefixtures("fewer_draws")
OVER = Deadline(at=0.0)
"""No time at all."""


@pytest.fixture(scope="module")
def engine():
    drafter = drafter_of("model")
    return outrider.load(llama(), drafter=drafter, length="fixed:2", ignore_generation_config=True, probe=False)


@pytest.fixture(scope="module")
def prompts(engine):
    return openings(engine)


def test_greedy_texts_are_compared_as_far_as_time_goes_and_a_few_tokens_at_least(engine, prompts):
    whole = identity(engine, prompts, 24)
    assert whole.holds
    short = identity(engine, prompts, 24, OVER)
    assert short.holds
    assert LEAST_TOKENS * len(prompts) <= short.num_tokens < whole.num_tokens
    assert not engine.busy


def test_rows_of_drafts_are_compared_however_little_time_there_is(engine, prompts):
    exact = in_float32(engine)
    whole, short = (compare_nodes(exact, prompts, 8, until) for until in (ENDLESS, OVER))
    assert short.holds
    assert 0 < short.num_drafted < whole.num_drafted
    assert not exact.busy


def test_the_gate_says_what_it_checked_and_is_made_again_only_for_more_time(engine, prompts, monkeypatch, tmp_path):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    hurried = gate(engine, 1e-9)
    assert hurried.fault is None
    assert f"{hurried.identity.num_tokens} greedy tokens" in hurried.summary
    assert gate(engine, 1e-9) == hurried
    thorough = gate(engine, 1000.0)
    assert thorough.identity.num_tokens > hurried.identity.num_tokens
    # What was checked whole counts, however much time is given.
    assert gate(engine, 2000.0) == gate(engine, 1e-9) == thorough


def test_engines_of_one_target_are_checked_by_one_copy_in_float32(engine, prompts, monkeypatch):
    cast, cast_from = LanguageModel.cast, list[LanguageModel]()
    monkeypatch.setattr(LanguageModel, "cast", lambda lm, dtype: cast_from.append(lm) or cast(lm, dtype))
    monkeypatch.setattr(remembered, "read", lambda *record: None)
    copies: Copies = []
    other = Engine(engine.parts, max_slots=engine.max_slots)
    for each in (engine, other, engine):
        assert gate(each, 1e-9, copies).fault is None
    assert cast_from.count(engine.parts.target) == 1


def test_draws_go_on_while_they_tell_nothing_and_time_is_left(engine, prompts):
    asked = sampled_law(engine, prompts, 8, temperature=1.0)
    assert asked.verdict == "inconclusive"
    assert asked.test.num_draws == 8
    more = sampled_law(engine, prompts, 8, temperature=1.0, until=Deadline.after(600))
    assert more.verdict == "fits"
    assert more.num_accepted_tokens > 0
    assert more.test.num_draws > 8
    none = sampled_law(engine, prompts, 10**6, temperature=1.0, until=OVER)
    assert 0 < none.test.num_draws < 100


def test_a_slow_target_is_judged_by_short_outputs_of_few_prompts(monkeypatch):
    seconds, run = [0.0], statistics.run_watched

    def slow(engine, requests, *more):
        seconds[0] += sum(request.max_new_tokens / 3 for request in requests)
        return run(engine, requests, *more)

    monkeypatch.setattr(statistics, "run_watched", slow)
    drafter = drafter_of("model")
    pair = outrider.load(llama(), drafter=drafter, length="fixed:5", ignore_generation_config=True, probe=False)
    prompts = openings(pair)
    found = sampled_law(pair, prompts, 1000, until=Deadline(at=210.0, clock=lambda: seconds[0]))
    assert (found.verdict, found.length, len(found.temperatures)) == ("fits", SHORT, 1)
    assert found.test.num_draws < 100
    seconds[0] = 0.0
    found = sampled_law(pair, prompts, 1000, until=Deadline(at=1800.0, clock=lambda: seconds[0]))
    assert (found.verdict, found.length, len(found.temperatures)) == ("fits", LONGEST, len(prompts))


def test_draws_leave_time_to_judge_them(engine, prompts):
    looks = count()
    sampled_law(engine, prompts, 10**6, temperature=1.0, until=Deadline(at=30, clock=lambda: next(looks)))
    # The clock goes on by a second for each look at it. It is looked at after every few draws, and never behind them.
    assert 15 <= next(looks) <= 20


def test_no_time_is_spent_on_draws_that_cannot_tell_more(engine, prompts):
    # Hardly anything but the likeliest output comes at such a temperature.
    cold = sampled_law(engine, prompts, 100, temperature=0.001, until=Deadline.after(600))
    assert (cold.verdict, cold.test.num_draws) == ("inconclusive", 100)
    plain = outrider.load(llama(), drafter="none", ignore_generation_config=True, probe=False)
    undrafted = sampled_law(plain, prompts, 100, temperature=1.0, until=Deadline.after(600))
    assert (undrafted.verdict, undrafted.test.num_draws) == ("inconclusive", 100)


def test_a_drafter_whose_tokens_are_never_accepted_is_no_proof(engine, prompts):
    found = sampled_law(engine, prompts, 200, temperature=1.0)
    assert replace(found, num_accepted_tokens=0).verdict == "inconclusive"


def test_what_the_doctor_measures_in_no_time_is_told(engine):
    texts = [list(range(2, 40)) for _ in range(3)]
    assert 0 < len(along_text(engine, texts, until=OVER).depths) < len(along_text(engine, texts).depths)
    assert run_freely(engine, texts, until=OVER).num_draft_tokens > 0
    found = measure(engine, texts, rounds=1, until=OVER)
    assert found.worth is not None
    assert [note.partition(" for ")[0] for note in found.notes] == ["There was time", "There was time"]
    assert measure(engine, texts, rounds=0).notes == []


def test_a_drafter_of_repetitions_finds_the_targets_own_text():
    engine = outrider.load(llama(), drafter="suffix", length="fixed:2", ignore_generation_config=True, probe=False)
    prompt = [3, 1, 2]
    text = repeated(engine, prompt)
    told = text[len(prompt) : -len(prompt)]
    assert text == [*prompt, *told, *prompt]
    greedy = outrider.Sampling(temperature=0.0)
    (output,) = engine.generate([text], max_new_tokens=len(told), ignore_eos=True, sampling=greedy)
    assert output.num_draft_tokens > 0
    (plain,) = engine.generate([prompt], max_new_tokens=len(told), ignore_eos=True, sampling=greedy)
    assert list(plain.tokens) == told
