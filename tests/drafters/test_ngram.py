"""Prompt lookup against a search through the whole context."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.types import InputError
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.none import NoDrafter
from tests.drafters.asking import chain, chains, running, step

texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)
chunks = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=8)
sizes = st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted)


def searched(context: Sequence[int], smallest: int, largest: int, depth: int) -> list[int]:
    """The newest earlier occurrence of the longest end of the context, by trying all of them."""
    for size in range(largest, smallest - 1, -1):
        for end in range(len(context) - 1, size - 1, -1):
            if list(context[end - size : end]) == list(context[-size:]):
                return list(context[end : end + depth])
    return []


@given(text=texts, bounds=sizes, depth=st.integers(1, 8))
def test_the_draft_is_what_a_full_search_finds(text: list[int], bounds: list[int], depth: int) -> None:
    drafter = NgramDrafter(prompt_lookup_min=bounds[0], prompt_lookup_max=bounds[1])
    assert chain(drafter, running(drafter, text), depth) == searched(text, *bounds, depth)


@given(text=texts, more=chunks, bounds=sizes)
def test_an_index_that_grew_with_the_request_equals_one_built_from_scratch(
    text: list[int], more: list[list[int]], bounds: list[int]
) -> None:
    drafter = NgramDrafter(prompt_lookup_min=bounds[0], prompt_lookup_max=bounds[1])
    grown = running(drafter, text)
    for chunk in more:
        chain(drafter, grown, 4)
        step(drafter, grown, chunk)
    fresh = running(drafter, grown.tokens)
    assert chain(drafter, grown, 8) == chain(drafter, fresh, 8)
    assert grown.drafter_state == fresh.drafter_state


@given(text=texts, depth=st.integers(1, 8))
def test_drafting_leaves_nothing_behind(text: list[int], depth: int) -> None:
    drafter = NgramDrafter()
    shallow, deep = running(drafter, text), running(drafter, text)
    chain(drafter, shallow, 1)
    first = chain(drafter, deep, depth)
    assert deep.tokens == text
    assert deep.drafter_state == shallow.drafter_state
    assert chain(drafter, deep, depth) == first


@given(batch=st.lists(texts, min_size=1, max_size=5))
def test_a_request_is_proposed_the_same_alone_and_in_a_batch(batch: list[list[int]]) -> None:
    drafter = NgramDrafter(prompt_lookup_min=1)
    together = chains(drafter, [running(drafter, text, str(i)) for i, text in enumerate(batch)], 6)
    assert together == [chain(drafter, running(drafter, text), 6) for text in batch]


@given(text=texts, length=st.integers(0, 60), other=texts)
def test_reuse_for_another_prompt_equals_opening(text: list[int], length: int, other: list[int]) -> None:
    drafter = NgramDrafter()
    old, new = running(drafter, text), running(drafter, text[:length] + other)
    chain(drafter, old, 3)
    expected = chain(drafter, new, 6)
    new.drafter_state = drafter.reuse(old.drafter_state, new.request, min(length, len(text)))
    assert chain(drafter, new, 6) == expected


def test_a_longer_end_wins_over_a_newer_one_and_the_newest_of_equal_length_wins() -> None:
    drafter = NgramDrafter(prompt_lookup_min=1, prompt_lookup_max=3)
    assert chain(drafter, running(drafter, [1, 2, 3, 7, 9, 3, 8, 1, 2, 3]), 2) == [7, 9]
    assert chain(drafter, running(drafter, [2, 3, 7, 2, 3, 8, 2, 3]), 1) == [8]


def test_the_draft_ends_where_the_context_ends() -> None:
    drafter = NgramDrafter()
    assert chain(drafter, running(drafter, [1, 2, 3, 1, 2]), 9) == [3, 1, 2]


def test_a_step_indexes_only_what_is_new() -> None:
    class Counting(list[int]):
        """A context that counts how many tokens are read from it."""

        read = 0

        def __getitem__(self, at):  # type: ignore[no-untyped-def]
            found = super().__getitem__(at)
            Counting.read += len(found) if isinstance(found, list) else 1
            return found

    drafter = NgramDrafter(prompt_lookup_min=2, prompt_lookup_max=4)
    state = running(drafter, [i * i % 97 for i in range(5000)])
    state.tokens = Counting(state.tokens)
    drafter.begin([state], [1])
    for _ in range(3):
        step(drafter, state, [1, 2])
        Counting.read = 0
        drafter.begin([state], [1])
        assert Counting.read < 50


@pytest.mark.parametrize(("smallest", "largest"), [(0, 4), (5, 4), (-1, -1)])
def test_impossible_sizes_are_refused_with_the_rule(smallest: int, largest: int) -> None:
    with pytest.raises(InputError, match=f"prompt_lookup_min must be between 1 and prompt_lookup_max={largest}"):
        NgramDrafter(prompt_lookup_min=smallest, prompt_lookup_max=largest)


@given(text=texts)
def test_none_never_proposes(text: list[int]) -> None:
    drafter = NoDrafter()
    assert chain(drafter, running(drafter, text), 5) == []
