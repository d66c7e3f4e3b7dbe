"""A comparison is a session of one group, and its speedup is over the fastest way that drafts nothing."""

import subprocess
import sys
from dataclasses import replace

import pytest

import outrider
from outrider import Sampling
from outrider.bench.side_by_side.comparison import SPECULATIVE, compare, figures, ways_of
from outrider.bench.side_by_side.configuration import PLAIN
from outrider.bench.side_by_side.verdict import headline
from outrider.engine.generation import Generation

TRANSFORMERS = "transformers generate"


@pytest.fixture(scope="module")
def engine():
    """The embedded pair in float32."""
    return outrider.load(dtype="float32", max_slots=2)


def greedy(max_new_tokens: int) -> Generation:
    return Generation(max_new_tokens=max_new_tokens, sampling=Sampling(temperature=0))


@pytest.fixture(scope="module")
def alone(engine):
    """A comparison on one prompt."""
    return compare(engine, [engine.encode("Once upon a time")], greedy(6), rounds=2)


def test_all_ways_say_as_many_tokens_and_transformers_takes_its_turns_where_it_is_alone(engine, alone):
    names = [row["method"] for row in alone.rows]
    assert {name: names.count(name) for name in names} == dict.fromkeys((SPECULATIVE, PLAIN, TRANSFORMERS), 2)
    assert {row["tokens"] for row in alone.rows} == {6}
    prompts = [engine.encode("Once upon a time"), engine.encode("One day, a dog")]
    several = compare(engine, prompts, greedy(4), rounds=1)
    assert {row["method"] for row in several.rows} == {SPECULATIVE, PLAIN}
    assert {row["requests"] for row in several.rows} == {2}


def test_a_comparison_whose_time_is_over_ends_with_the_round_that_it_is_in(engine):
    found = compare(engine, [engine.encode("Once upon a time")], greedy(2), rounds=3, time_limit=0.0)
    assert {(row["method"], row["round"]) for row in found.rows} == {(way, 0) for way in found.ways}
    assert figures(found)["rounds"] == 1


def test_forwards_that_are_padded_are_a_way_of_their_own(engine):
    engine.parts.target.pad_to = 2
    try:
        found = compare(engine, [engine.encode("One day")], greedy(2), rounds=1)
    finally:
        engine.parts.target.pad_to = 1
    assert found.ways == [SPECULATIVE, PLAIN, f"{PLAIN}, 2 columns", TRANSFORMERS]


def test_plain_decoding_reads_the_second_turn_as_little_anew_as_the_engine_with_drafts(engine):
    prompt = engine.encode("Once upon a time")
    found = {}
    for way in ways_of(engine, greedy(4), alone=False):
        way.engine.generate([prompt], options=greedy(4))
        [out] = way.engine.generate([[*prompt, *prompt]], options=greedy(4))
        found[way.name] = out.reused_tokens
        way.engine.rest()
    assert found == dict.fromkeys((SPECULATIVE, PLAIN), len(prompt))


def test_answers_end_at_the_end_of_the_context(engine):
    room = engine.parts.target.max_context
    found = compare(engine, [[1] * (room - 3)], replace(greedy(40), ignore_eos=True), rounds=1)
    assert {row["tokens"] for row in found.rows} == {3}


def test_the_speedup_is_of_medians_over_the_fastest_way_that_drafts_nothing(alone):
    [first, *_] = alone.rows
    rows = [
        {**first, "method": name, "round": i, "tokens": 10, "seconds": seconds}
        for name, each in ((SPECULATIVE, (1, 2, 9)), (PLAIN, (5, 5, 6)), (TRANSFORMERS, (8, 4, 4)))
        for i, seconds in enumerate(each)
    ]
    made = figures(replace(alone, rows=rows))
    assert made["plain"] == TRANSFORMERS
    assert made["speedup"] == pytest.approx(2)
    assert made["tokens_per_second"] == pytest.approx({SPECULATIVE: 5, PLAIN: 2, TRANSFORMERS: 2.5})
    assert f"{TRANSFORMERS}, the fastest way in this process that drafts nothing" in headline(replace(alone, rows=rows))


def test_the_command_line_and_its_comparison_need_no_library_of_an_extra():
    blocked = "import sys; sys.modules.update(dict.fromkeys(['matplotlib', 'scipy', 'jinja2', 'datasets', 'optuna']))"
    command = f"{blocked}; import outrider.cli.app, outrider.cli.compared"
    subprocess.run([sys.executable, "-c", command], check=True, timeout=120)
