"""Default lengths follow the load; a request with a seed drafts a length of its own, so that its output repeats."""

from dataclasses import replace

import pytest

import outrider
from outrider import InputError, Sampling, catalog
from outrider.core.types import Step
from outrider.engine.engine import Engine
from outrider.lengths.goodput import GoodputLength
from tests.world.models import llama

PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [5, 6, 7, 5, 6, 7], [9, 8, 9, 8, 9, 8], [4, 4, 4, 4]]


def engine(**options: object) -> Engine:
    return outrider.load(llama(), drafter="ngram:prompt_lookup_min=1", **options)


def resting(engine: Engine) -> Engine:
    """The same engine, to which no draft seems worth its cost."""
    for requests in range(1, 9):
        for length in range(9):
            engine.parts.experience.costs.set(requests, length, 1.0 if length == 0 else 1000.0)
    engine.parts.experience.credit = -1e9
    return engine


def drafted(engine: Engine, seeds: list[int | None], temperature: float = 1.0) -> list[int]:
    """The longest draft of each request; all run at once."""
    most = [0] * len(seeds)

    def note(made: Step) -> None:
        most[int(made.request)] = max(most[int(made.request)], made.num_draft_tokens)

    for i, seed in enumerate(seeds):
        sampling = Sampling(temperature=temperature, seed=seed)
        engine.add(PROMPTS[i], id=str(i), max_new_tokens=12, sampling=sampling, ignore_eos=True)
    while engine.busy:
        engine.step(note)
    return most


def test_requests_with_a_seed_draft_where_the_load_lets_no_other_draft():
    most = drafted(resting(engine()), [7, None, 8, None])
    assert most[1] == most[3] == 0
    assert 0 < most[0] <= 5
    assert 0 < most[2] <= 5


def test_greedy_requests_follow_the_load_whatever_their_seed():
    assert drafted(resting(engine()), [7, None], temperature=0.0) == [0, 0]


def test_a_seed_repeats_an_output_whatever_else_runs_and_whatever_the_engine_has_learnt():
    sampling = Sampling(temperature=1.0, seed=3)
    [alone] = engine().generate(PROMPTS[:1], max_new_tokens=24, sampling=sampling, ignore_eos=True)
    for busy in (engine(), resting(engine())):
        others = [Sampling(temperature=1.0), Sampling(temperature=0.0), Sampling(temperature=1.0, seed=9)]
        outputs = busy.generate(PROMPTS, max_new_tokens=24, sampling=[sampling, *others], ignore_eos=True)
        assert outputs[0].tokens == alone.tokens
        assert outputs[0].num_draft_tokens == alone.num_draft_tokens


def test_steps_with_a_seeded_request_teach_nothing():
    told = resting(engine())
    drafted(told, [7, None, None])
    assert told.parts.experience.costs.num_steps == 0
    drafted(told, [None, None])
    assert told.parts.experience.costs.num_steps > 0


def test_without_a_length_for_seeds_they_follow_the_load():
    assert drafted(resting(engine(length="goodput")), [7, 8]) == [0, 0]


@pytest.mark.parametrize(
    "options",
    [{"drafter": "model", "tree": "dynamic"}, {"drafter": "model", "decoding": "pearl:4"}],
    ids=["a branching tree", "drafting ahead"],
)
def test_parts_that_need_one_length_get_a_fixed_one_by_default(options: dict[str, str], tmp_path):
    llama(num_layers=1).save_pretrained(tmp_path)
    options = options | {"drafter": f"model:path={tmp_path}"}
    assert catalog.name_of(outrider.load(llama(), **options).parts.length) == "fixed"
    with pytest.raises(InputError, match="goodput"):
        outrider.load(llama(), **options, length="goodput")


def test_the_default_length_follows_the_load():
    assert engine().parts.length == GoodputLength(seeded=5)
    assert outrider.load().parts.length == replace(GoodputLength(), seeded=4)


def test_a_negative_length_for_seeds_is_refused():
    with pytest.raises(InputError, match="seeded must be >= 0, got -1"):
        engine(length="goodput:seeded=-1")
