"""A request with a seed adapts its length and repeats its text: by kept costs, its own acceptance and the batch."""

from dataclasses import replace

import pytest

import outrider
from outrider import InputError, Sampling, catalog
from outrider.core.types import Step
from outrider.engine.engine import Engine
from outrider.lengths.acceptance import Counts
from outrider.lengths.costs import CostTable
from outrider.lengths.experience import Experience, PolicyState
from outrider.lengths.goodput import GoodputLength
from tests.world.models import llama

PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [5, 6, 7, 5, 6, 7], [9, 8, 9, 8, 9, 8], [4, 4, 4, 4]]
CELLS = {
    f"{drafter}, {verifier}": {"drafter": drafter, "verifier": verifier}
    for drafter in ("ngram:prompt_lookup_min=1", "suffix:min_match=1", "model", "first")
    for verifier in ("token", "block", "match")
}


def engine(**options: object) -> Engine:
    return outrider.load(llama(), **{"drafter": "ngram:prompt_lookup_min=1"} | options)


def costing(engine: Engine, draft: float) -> Engine:
    """The same engine, in which a draft of n tokens costs 1 + n `draft`."""
    table = CostTable.of_formula(lambda requests, length: 1 + length * draft)
    engine.parts = replace(engine.parts, experience=Experience(table))
    return engine


def experienced(engine: Engine) -> Engine:
    """The same engine after other requests, whose drafts all failed, so that it stopped them."""
    engine.parts.experience.sampled = Counts(tested=(300.0,) * 9, accepted=(300.0, *[1.0] * 8))
    engine.parts.experience.state = PolicyState(gain=-0.5)
    return engine


def drafts(engine: Engine, seeds: list[int | None], temperature: float = 1.0) -> list[list[int]]:
    """The draft lengths of each request; all run at once."""
    found: list[list[int]] = [[] for _ in seeds]

    def note(made: Step) -> None:
        found[int(made.request)].append(made.num_draft_tokens)

    for i, seed in enumerate(seeds):
        sampling = Sampling(temperature=temperature, seed=seed)
        engine.add(PROMPTS[i], id=str(i), max_new_tokens=40, sampling=sampling, ignore_eos=True)
    while engine.busy:
        engine.step(note)
    return found


@pytest.mark.parametrize("cell", CELLS)
def test_the_same_command_with_the_same_seed_repeats_its_text(cell, draft_model):
    written = {"model": draft_model, "first": f"first:suffix:min_match=1,{draft_model}"}
    options = CELLS[cell] | {"drafter": written.get(CELLS[cell]["drafter"], CELLS[cell]["drafter"])}
    sampling = [Sampling(temperature=warmth, seed=seed) for seed, warmth in enumerate((1.0, 0.7, 1.3, 1.0))]

    def texts(engine: Engine) -> list[list[int]]:
        outputs = engine.generate(PROMPTS, max_new_tokens=24, sampling=sampling, ignore_eos=True)
        return [[*output.tokens, output.num_steps, output.num_draft_tokens] for output in outputs]

    first = texts(costing(engine(**options), 0.2))
    # Another process, one that has seen other requests, and the same process once more.
    later = experienced(costing(engine(**options), 0.2))
    assert texts(later) == first
    assert texts(later) == first


def test_requests_with_a_seed_follow_the_costs():
    assert drafts(costing(engine(), 9.0), [7, 8]) == [[0] * 40, [0] * 40]
    assert all(max(lengths) > 0 for lengths in drafts(costing(engine(), 0.01), [7, 8]))


def test_requests_with_a_seed_draft_less_when_their_drafts_fail():
    used = costing(engine(), 0.15)
    # The prompt repeats itself, and random weights continue it with anything.
    [lengths] = drafts(used, [7])
    drafted = [length for length in lengths if length]
    assert drafted[0] > drafted[-1]


def test_greedy_requests_follow_the_pooled_acceptance_whatever_their_seed():
    used = costing(engine(), 0.3)
    used.parts.experience.greedy = Counts(tested=(300.0,) * 9, accepted=(300.0, *[1.0] * 8))
    assert max(map(max, drafts(used, [7, None], temperature=0.0))) == 0


def test_without_kept_costs_a_request_with_a_seed_drafts_the_fixed_length():
    used = costing(engine(), 9.0)
    table = replace(used.parts.experience.costs, kept=False)
    used.parts = replace(used.parts, experience=Experience(table))
    lengths = drafts(used, [7, None])
    assert max(lengths[0]) == 5
    assert max(lengths[1]) == 0


@pytest.mark.parametrize(
    "options",
    [{"tree": "opt"}, {"decoding": "pearl:4"}],
    ids=["a branching tree", "drafting ahead"],
)
def test_parts_that_need_one_length_get_a_fixed_one_by_default(options: dict[str, str], draft_model):
    options = options | {"drafter": draft_model}
    assert catalog.name_of(outrider.load(llama(), **options).parts.length) == "fixed"
    with pytest.raises(InputError, match="goodput"):
        outrider.load(llama(), **options, length="goodput")


def test_a_tree_that_goodput_can_size_has_a_fixed_depth_by_default(draft_model):
    options = {"tree": "dynamic", "drafter": draft_model}
    assert catalog.name_of(outrider.load(llama(), **options).parts.length) == "fixed"


def test_the_default_length_follows_the_costs():
    assert engine().parts.length == GoodputLength()
    assert outrider.load().parts.length == GoodputLength(fallback=4)
