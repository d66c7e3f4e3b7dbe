"""Comparisons run every way equally often, and their speedup is over the fastest that drafts nothing."""

import subprocess
import sys

import pytest

import outrider
from outrider import Sampling
from outrider.bench.compare import SPECULATIVE, Comparison, TimedRun, compare
from outrider.bench.runs import Conditions, PromptBatch, on_engine, on_transformers
from outrider.bench.side_by_side.configuration import PLAIN
from recipes.questions import Question


@pytest.fixture(scope="module")
def engine():
    """The embedded pair in float32."""
    return outrider.load(dtype="float32", max_slots=2)


def test_all_ways_say_as_many_tokens_and_transformers_takes_its_turns_where_it_is_alone(engine):
    prompts = [engine.encode("Once upon a time"), engine.encode("One day, a dog")]
    rounds: list[None] = []
    found = compare(
        engine,
        prompts[:1],
        max_new_tokens=6,
        sampling=Sampling(temperature=0),
        rounds=2,
        progress=lambda: rounds.append(None),
    )
    names = [run.configuration for run in found.runs]
    assert {name: names.count(name) for name in names} == dict.fromkeys(
        (SPECULATIVE, PLAIN, "transformers generate"), 2
    )
    assert {run.tokens for run in found.runs} == {6}
    assert len(rounds) == 3
    several = compare(engine, prompts, max_new_tokens=4, sampling=Sampling(temperature=0), rounds=1)
    assert {run.configuration for run in several.runs} == {SPECULATIVE, PLAIN}


def test_the_speedup_is_over_the_fastest_plain_way():
    runs = [
        TimedRun(configuration=name, tokens=10, seconds=seconds)
        for name, seconds in ((SPECULATIVE, 1), (SPECULATIVE, 2), (SPECULATIVE, 9), ("a", 5), ("b", 4))
    ]
    found = Comparison(runs=runs)
    assert (found.plain, found.speedup) == ("b", 2)


def test_transformers_and_the_engine_say_the_same_alone_and_in_a_padded_batch(engine):
    texts = ("Once upon a time, there was a little", "One day", "The dog and the cat went to")
    asked = tuple(Question(id=text, category="", tokens=tuple(engine.encode(text))) for text in texts)
    conditions = Conditions(max_new_tokens=8, temperature=0.0, ignore_eos=True)
    model = engine.parts.target.model
    ours = on_engine(engine, PromptBatch(questions=asked), conditions)
    together = on_transformers(model, PromptBatch(questions=asked), conditions)
    assert [list(tokens) for tokens in ours.tokens] == [list(tokens) for tokens in together.tokens]
    assert together.forwards == 8
    assert ours.digest == together.digest
    assert model.generation_config.eos_token_id is not None


def test_the_command_line_needs_no_library_of_an_extra():
    blocked = "import sys; sys.modules.update(dict.fromkeys(['matplotlib', 'scipy', 'jinja2']))"
    subprocess.run([sys.executable, "-c", f"{blocked}; import outrider.cli.app"], check=True, timeout=120)
