"""Several tokens behind each node of a tree, from drafters that copy, against a search through all that they know."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import catalog
from outrider.core.dice import PhiloxDice
from outrider.core.types import Draft, Request, Running, Sampling
from outrider.drafters.automaton import ENDS
from outrider.drafters.continuations import COPIED, MOST, continuations
from outrider.drafters.ngram import PLACES, NgramDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine.engine import Engine
from outrider.lengths.fixed import FixedLength
from outrider.lm.tabular import TabularLM
from outrider.trees.grow import grow
from tests.drafters.asking import running, step
from tests.drafters.test_suffix import _remembering, followers
from tests.world.parts import parts_of

texts = st.lists(st.integers(0, 2), min_size=1, max_size=40)
lists = st.lists(texts, min_size=1, max_size=4)
DRAFTERS = {"suffix": SuffixDrafter(min_match=1), "ngram": NgramDrafter(prompt_lookup_min=1)}
Ends = Sequence[tuple[int, Mapping[int, tuple[int, int]]]]


def draft_of(drafter: object, states: Sequence[Running], depth: int, tree: str = "dynamic:num_nodes=60") -> Draft:
    dice = PhiloxDice(seeds=[0] * len(states), steps=[0] * len(states))
    length = FixedLength(num_speculative_tokens=depth)
    return grow(drafter, catalog.make("tree", tree), length, states, [depth] * len(states), dice, torch.device("cpu"))


def paths(draft: Draft, request: int = 0) -> list[tuple[int, ...]]:
    """The tokens that lead to each draft node of a request."""
    found: dict[int, tuple[int, ...]] = {}
    first, end = draft.offsets[request : request + 2].tolist()
    for node in range(first, end):
        parent = int(draft.parents[node])
        found[node] = () if parent < 0 else (*found[parent], int(draft.tokens[node]))
    return list(found.values())[1:]


def suffix_ends(known: Sequence[Sequence[int]], context: Sequence[int], min_match: int) -> Ends:
    """What followed the ends of a context in each of some texts; one end of those that occur at the same places."""
    found = []
    for text in known:
        classes: dict[tuple[int, ...], int] = {}
        for size in range(len(context), 0, -1):
            end = list(context[len(context) - size :])
            places = tuple(at + size for at in range(len(text) - size + 1) if list(text[at : at + size]) == end)
            if places and list(text) == list(context) and places == (len(text),):
                continue
            if places:
                classes.setdefault(places, size)
        sizes = [size for size in list(classes.values())[:ENDS] if size >= min_match]
        found += [(size, followers(text, context[len(context) - size :])) for size in sizes]
    return sorted(found, key=lambda end: -end[0])


def ngram_ends(context: Sequence[int], tail: Sequence[int], smallest: int, largest: int) -> Ends:
    """What followed the newest occurrences of the ends of a tail."""
    found = []
    for size in range(min(largest, len(tail)), smallest - 1, -1):
        end, counted = list(tail[len(tail) - size :]), dict[int, tuple[int, int]]()
        places = [at for at in range(max(size, 1), len(context)) if list(context[at - size : at]) == end]
        for place in places[-PLACES:]:
            counted[context[place]] = counted.get(context[place], (0, 0))[0] + 1, place
        found.append((size, counted))
    return found


def grown(ends: object, depth: int, so_far: tuple[int, ...] = ()) -> dict[tuple[int, ...], float]:
    """The product of chances of every path, by asking for the ends of every context anew."""
    found: dict[tuple[int, ...], float] = {}
    if len(so_far) < depth:
        for token, chance in continuations(ends(so_far)).items():
            found[*so_far, token] = chance
            below = grown(ends, depth, (*so_far, token))
            found |= {path: chance * product for path, product in below.items()}
    return found


@settings(max_examples=40, deadline=None)
@given(ends=st.lists(st.dictionaries(st.integers(0, 5), st.integers(1, 9), max_size=4), max_size=5))
def test_chances_are_those_of_partial_matching(ends: list[dict[int, int]]) -> None:
    sizes = range(len(ends), 0, -1)
    found = continuations([(n, {t: (c, 0) for t, c in f.items()}) for n, f in zip(sizes, ends, strict=True)])
    expected, escaped, known = dict[int, float](), 1.0, set[int]()
    for size, counts in zip(sizes, ends, strict=True):
        fresh = {token: count for token, count in counts.items() if token not in known}
        expected |= {token: escaped * COPIED[size] * count / sum(fresh.values()) for token, count in fresh.items()}
        escaped *= 1 - COPIED[size] if fresh else 1
        known |= set(counts)
    assert found == pytest.approx(expected)
    assert sum(found.values()) == pytest.approx(1 - escaped)


@settings(max_examples=40, deadline=None)
@given(text=texts, min_match=st.integers(1, 3))
def test_suffix_grows_all_paths_that_a_full_search_finds(text: list[int], min_match: int) -> None:
    drafter = SuffixDrafter(min_match=min_match)
    made = paths(draft_of(drafter, [running(drafter, text)], 3))
    expected = grown(lambda more: suffix_ends([text], [*text, *more], min_match), 3)
    assert set(made) == set(expected)
    assert len(made) == len(expected)


@settings(max_examples=40, deadline=None)
@given(text=texts, bounds=st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted))
def test_ngram_grows_all_paths_that_a_full_search_finds(text: list[int], bounds: list[int]) -> None:
    drafter = NgramDrafter(prompt_lookup_min=bounds[0], prompt_lookup_max=bounds[1])
    made = paths(draft_of(drafter, [running(drafter, text)], 3))
    assert set(made) == set(grown(lambda more: ngram_ends(text, [*text, *more], *bounds), 3))


@settings(max_examples=40, deadline=None)
@given(text=texts, outputs=lists)
def test_remembered_texts_branch_beside_the_requests_own(text: list[int], outputs: list[list[int]]) -> None:
    drafter = _remembering(outputs, min_match=1)
    known = [token for output in dict.fromkeys(map(tuple, outputs)) for token in [*output, -1]]
    made = paths(draft_of(drafter, [running(drafter, text)], 2))
    assert set(made) == set(grown(lambda more: suffix_ends([text, known], [*text, *more], 1), 2))


@settings(max_examples=40, deadline=None)
@given(text=texts, num_nodes=st.integers(1, 8))
def test_a_tree_keeps_the_nodes_with_the_largest_products(text: list[int], num_nodes: int) -> None:
    drafter = DRAFTERS["suffix"]
    products = grown(lambda more: suffix_ends([text], [*text, *more], 1), 3)
    made = paths(draft_of(drafter, [running(drafter, text)], 3, f"dynamic:num_nodes={num_nodes}"))
    assert len(made) == min(num_nodes, len(products))
    best = sorted(products.values(), reverse=True)[:num_nodes]
    assert sorted((products[path] for path in made), reverse=True) == pytest.approx(best)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize(
    "tree", ["dynamic:num_nodes=9", "opt:num_nodes=9", "lattice:num_nodes=9", "fixed:2x2x1,chosen=true"]
)
@settings(max_examples=40, deadline=None)
@given(batch=lists)
def test_every_tree_that_chooses_grows_alike_alone_and_in_a_batch(name: str, tree: str, batch: list[list[int]]) -> None:
    drafter = DRAFTERS[name]
    together = draft_of(drafter, [running(drafter, text, str(i)) for i, text in enumerate(batch)], 3, tree)
    for request, text in enumerate(batch):
        alone = paths(draft_of(drafter, [running(drafter, text)], 3, tree))
        assert paths(together, request) == alone
        assert len(set(alone)) == len(alone)
    assert (together.tokens >= 0).all()


@pytest.mark.parametrize("name", DRAFTERS)
@settings(max_examples=40, deadline=None)
@given(text=texts, more=lists)
def test_a_request_that_grew_branches_as_one_that_is_new(name: str, text: list[int], more: list[list[int]]) -> None:
    drafter = DRAFTERS[name]
    old = running(drafter, text)
    for chunk in more:
        draft_of(drafter, [old], 2)
        step(drafter, old, chunk)
    assert paths(draft_of(drafter, [old], 3)) == paths(draft_of(drafter, [running(drafter, old.tokens)], 3))


def test_a_node_gets_no_more_than_the_likeliest_tokens() -> None:
    text = [token for other in range(2 * MOST) for token in (9, other + 10)] + [9]
    guess = DRAFTERS["suffix"].branching.begin([running(DRAFTERS["suffix"], text)], [1])
    assert guess.choices.tokens.shape == (1, MOST)
    assert guess.choices.tokens[0, 0] == 2 * MOST + 9, "of equally frequent ones the latest"


@pytest.mark.parametrize("name", DRAFTERS)
def test_what_a_client_predicts_is_a_chain_before_all_else(name: str) -> None:
    drafter = DRAFTERS[name]
    request = Request(id="r", prompt=(1, 2, 1, 3, 1), max_new_tokens=9, sampling=Sampling(), prediction=(7, 8, 9))
    state = Running(
        request=request, tokens=[1, 2, 1, 3, 1], slot=0, drafter=drafter, drafter_state=drafter.open(request)
    )
    assert paths(draft_of(drafter, [state], 5)) == [(7,), (7, 8), (7, 8, 9)]
    drafter.commit([state], [[1, 2]])
    assert drafter.predicted(state.drafter_state) == (2, 1)


def test_a_text_from_which_a_tree_was_accepted_is_used() -> None:
    drafter = _remembering([[1, 2, 3, 4], [5, 6, 7, 8], [1, 9]], min_match=2, max_tokens=16)
    for path, read_again in (([], 0), ([1], 4)):
        state, before = running(drafter, [1, 2]), drafter._memory.num_read
        assert paths(draft_of(drafter, [state], 2)) == [(3,), (3, 4)]
        drafter.commit([state], [path])
        drafter._memory.read(99)
        assert drafter._memory.num_read - before == read_again


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_tree_catches_what_a_chain_misses(name: str) -> None:
    # Behind 0 stands one of four tokens, in an order that no end foretells.
    order = np.random.default_rng(5).integers(1, 5, 90)
    said = [token for each in order.tolist() for token in (0, each)]
    prompt, num_tokens = said[:60], 90
    target = TabularLM(lambda prefix: np.eye(5)[said[len(prefix)]], 5)
    steps = {}
    for tree in ("chain", "dynamic:num_nodes=16"):
        parts = parts_of(target, DRAFTERS[name], tree=tree, verifier="match", length=16)
        (output,) = Engine(parts, max_slots=1).generate(
            [prompt], max_new_tokens=num_tokens, sampling=Sampling(temperature=0.0, seed=0)
        )
        assert list(output.tokens) == said[60 : 60 + num_tokens]
        steps[tree] = len(output.steps)
        assert all(step.num_draft_tokens <= 16 for step in output.steps)
    assert steps["dynamic:num_nodes=16"] < 0.75 * steps["chain"], steps
