"""The suffix drafter and its automaton against a search through all that was fed to them."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.types import InputError, Running
from outrider.drafters.automaton import ENDS, SuffixAutomaton
from outrider.drafters.memory import TextMemory
from outrider.drafters.suffix import LEAST, LOOK, READ, SuffixDrafter, SuffixState
from outrider.lm.target_info import TargetInfo
from tests.drafters.asking import chain, chains, running, step

texts = st.lists(st.integers(0, 2), min_size=1, max_size=50)
chunks = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=8)
TARGET_INFO = TargetInfo(
    tokenizer=None, vocab_size=9, device=torch.device("cpu"), dtype=torch.float32, max_slots=4, max_context=99
)


def followers(known: Sequence[int], end: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Per token that follows an occurrence of `end`: how often, and where last."""
    found: dict[int, tuple[int, int]] = {}
    for at in range(len(known) - len(end)):
        if list(known[at : at + len(end)]) == list(end) and known[at + len(end)] >= 0:
            token = known[at + len(end)]
            found[token] = (found.get(token, (0, 0))[0] + 1, at)
    return found


def searched(known: Sequence[int], context: Sequence[int], min_match: int) -> tuple[int, int]:
    """Length of the longest end of the context that something follows in `known`, and what most often does."""
    for size in range(len(context), min_match - 1, -1):
        if found := followers(known, context[len(context) - size :]):
            return size, max(found, key=found.__getitem__)
    return 0, -1


def walked(known: Sequence[int], end: Sequence[int], min_match: int, depth: int) -> tuple[float, list[int]]:
    """The tokens that most often follow an end, each behind the ones before, and how many of them are expected."""
    path: list[int] = []
    total, reached = 0.0, 1.0
    while len(path) < depth:
        size, token = searched(known, [*end, *path], min_match)
        if token < 0:
            break
        found = followers(known, [*end, *path][len(end) + len(path) - size :])
        reached *= found[token][0] / sum(count for count, _ in found.values())
        if reached < LEAST:
            break
        path.append(token)
        total += reached
    return total, path


def ends(known: Sequence[int], context: Sequence[int]) -> list[Sequence[int]]:
    """The longest ends of the context that occur in a text, not counting its own end; one of those that occur at the
    same places.
    """
    found: dict[tuple[int, ...], Sequence[int]] = {}
    last = len(known) if list(known) == list(context) else len(known) + 1
    for size in range(len(context), 0, -1):
        end = list(context[len(context) - size :])
        places = [at + size for at in range(len(known) - size + 1) if list(known[at : at + size]) == end]
        if places := [place for place in places if place < last]:
            found.setdefault(tuple(places), end)
    return list(found.values())[:ENDS]


def best(known: Sequence[int], context: Sequence[int], min_match: int, depth: int) -> tuple[float, int, list[int]]:
    """Of the ends of the context, what the one with the most expected tokens is continued by: how many are expected,
    the length of the end, and the tokens. Of equal ones the longest end's.
    """
    choice: tuple[float, int, list[int]] = (0.0, 0, [])
    for end in ends(known, context):
        if len(end) >= min_match:
            total, path = walked(known, end, min_match, depth)
            if total > choice[0]:
                choice = (total, len(end), path)
    return choice


@given(text=texts, word=st.lists(st.integers(0, 2), max_size=6))
def test_the_automaton_recognises_exactly_the_substrings(text: list[int], word: list[int]) -> None:
    automaton = SuffixAutomaton(text)
    state = 0
    for token in word:
        state = automaton.next[state].get(token, -1) if state >= 0 else -1
    assert (state >= 0) == any(text[at : at + len(word)] == word for at in range(len(text) - len(word) + 1))


@given(text=texts)
def test_the_automaton_stays_within_twice_the_text(text: list[int]) -> None:
    assert len(SuffixAutomaton(text).length) <= max(2, 2 * len(text))


@given(text=texts)
def test_the_repeated_suffix_is_the_longest_one_that_occurs_earlier(text: list[int]) -> None:
    automaton = SuffixAutomaton(text)
    earlier = [s for s in range(1, len(text)) if any(text[e - s : e] == text[-s:] for e in range(s, len(text)))]
    assert automaton.length[automaton.repeated_suffix()] == max(earlier, default=0)


@given(known=texts, context=texts)
def test_a_match_is_the_longest_end_of_what_was_walked(known: list[int], context: list[int]) -> None:
    automaton = SuffixAutomaton(known)
    state = length = 0
    for end, token in enumerate(context, 1):
        state, length = automaton.step(state, length, token)
        occurring = [
            size
            for size in range(1, end + 1)
            if any(known[at : at + size] == context[end - size : end] for at in range(len(known) - size + 1))
        ]
        assert length == max(occurring, default=0)
        shorter, size = automaton.shorten(state, length)
        assert (size, automaton.likeliest(shorter)) == searched(known, context[:end], 0)


@given(text=texts, min_match=st.integers(1, 4), depth=st.integers(1, LOOK))
def test_the_draft_is_what_a_full_search_finds(text: list[int], min_match: int, depth: int) -> None:
    drafter = SuffixDrafter(min_match=min_match)
    assert chain(drafter, running(drafter, text), depth) == best(text, text, min_match, LOOK)[2][:depth]


@given(text=texts, more=chunks)
def test_an_automaton_that_grew_with_the_request_equals_one_built_from_scratch(
    text: list[int], more: list[list[int]]
) -> None:
    drafter = SuffixDrafter(min_match=1)
    grown = running(drafter, text)
    for chunk in more:
        chain(drafter, grown, 4)
        step(drafter, grown, chunk)
    fresh = running(drafter, grown.tokens)
    assert chain(drafter, grown, 8) == chain(drafter, fresh, 8)
    assert _inside(grown.drafter_state) == _inside(fresh.drafter_state)


@given(text=texts, depth=st.integers(1, 8))
def test_drafting_leaves_nothing_behind(text: list[int], depth: int) -> None:
    drafter = SuffixDrafter(min_match=1)
    shallow, deep = running(drafter, text), running(drafter, text)
    chain(drafter, shallow, 1)
    first = chain(drafter, deep, depth)
    assert deep.tokens == text
    assert _inside(deep.drafter_state) == _inside(shallow.drafter_state)
    assert chain(drafter, deep, depth) == first


@given(batch=st.lists(texts, min_size=1, max_size=5))
def test_a_request_is_proposed_the_same_alone_and_in_a_batch(batch: list[list[int]]) -> None:
    drafter = SuffixDrafter(min_match=1)
    together = chains(drafter, [running(drafter, text, str(i)) for i, text in enumerate(batch)], 6)
    assert together == [chain(drafter, running(drafter, text), 6) for text in batch]


def test_the_most_frequent_continuation_wins_and_the_latest_on_a_tie() -> None:
    drafter = SuffixDrafter(min_match=1)
    assert chain(drafter, running(drafter, [5, 1, 5, 1, 5, 2, 9, 5]), 1) == [1]
    assert chain(drafter, running(drafter, [5, 1, 5, 2, 9, 5]), 1) == [2]


def test_a_long_periodic_context_is_continued_by_an_automaton_of_linear_size() -> None:
    state = running(SuffixDrafter(), [1, 2, 3] * 1000)
    assert chain(SuffixDrafter(), state, 7) == [1, 2, 3, 1, 2, 3, 1]
    assert len(_own(state.drafter_state).automaton.length) <= 2 * 3000


def test_a_shorter_end_is_followed_where_its_continuation_is_more_certain() -> None:
    # Behind 2 3 stands 4 once and 5 once; behind 3 stand 7 8 9 five times of seven.
    text = [1, 3, 7, 8, 9] * 5 + [2, 3, 4, 2, 3, 5, 2, 3]
    drafter = SuffixDrafter(min_match=1)
    assert best(text, text, 1, LOOK)[1] == 1
    assert chain(drafter, running(drafter, text), 3) == [7, 8, 9]


def test_a_draft_ends_where_it_has_become_unlikely() -> None:
    drafter = _remembering([[1, 2, *rest] for rest in itertools.product((3, 4), repeat=4)], min_match=2)
    assert len(chain(drafter, running(drafter, [1, 2]), 16)) == 3, "half of a half of a half is more than a tenth"


@given(documents=st.lists(texts, min_size=1, max_size=4), text=texts, depth=st.integers(1, 8))
def test_of_the_request_and_a_corpus_the_one_with_more_expected_tokens_drafts(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], text: list[int], depth: int
) -> None:
    drafter = _with_corpus(tmp_path_factory.mktemp("corpus"), documents)
    corpus = [token for document in documents for token in [*document, -1]]
    found = [best(known, text, 1, LOOK) for known in (text, corpus)]
    assert chain(drafter, running(drafter, text), depth) == max(found, key=lambda each: each[:2])[2][:depth]


@given(outputs=st.lists(texts, min_size=1, max_size=4), text=texts, depth=st.integers(1, 8))
def test_remembered_texts_draft_as_a_corpus_does(outputs: list[list[int]], text: list[int], depth: int) -> None:
    drafter = _remembering(outputs, min_match=1)
    known = [token for output in dict.fromkeys(map(tuple, outputs)) for token in [*output, -1]]
    found = [best(each, text, 1, LOOK) for each in (text, known)]
    assert chain(drafter, running(drafter, text), depth) == max(found, key=lambda each: each[:2])[2][:depth]


def test_a_request_that_repeats_its_text_or_has_another_owner_does_not_draft_from_remembered_texts() -> None:
    drafter = _remembering([[1, 2, 3, 4, 5]], min_match=2)
    usual = running(drafter, [1, 2])
    assert chain(drafter, usual, 3) == [3, 4, 5]
    for change in ({"repeats": True}, {"owner": "somebody"}):
        request = replace(usual.request, **change)
        other = Running(request=request, tokens=[1, 2], slot=0, drafter=drafter, drafter_state=drafter.open(request))
        assert chain(drafter, other, 3) == []


def test_ended_requests_are_read_a_few_tokens_in_each_step_of_others() -> None:
    drafter = _remembering([], min_match=2)
    memory = drafter._memory
    old = running(drafter, [1, 2, 3], "old")
    step(drafter, old, list(range(4, 8)) * 100)
    drafter.ended(old)
    assert memory.num_read == 0
    states = [running(drafter, [7, 8], "a"), running(drafter, [7, 9], "b")]
    counted = []
    while not counted or counted[-1] > 0:
        before = memory.num_read
        chains(drafter, states, 1)
        counted.append(memory.num_read - before)
        for state in states:
            step(drafter, state, [10 + len(counted)])
    assert max(counted) <= READ * len(states)
    assert sum(counted) == 3 + 400


def test_a_text_from_which_a_draft_was_accepted_is_used() -> None:
    drafter = _remembering([[1, 2, 3, 4], [5, 6, 7, 8], [1, 9]], min_match=2, max_tokens=16)
    for accepted, read_again in ((0, 0), (1, 4)):
        state, before = running(drafter, [1, 2]), drafter._memory.num_read
        assert chain(drafter, state, 2) == [3, 4]
        drafter.commit([state], [list(range(1, accepted + 1))])
        drafter._memory.read(99)
        assert drafter._memory.num_read - before == read_again


def test_a_corpus_does_not_run_from_one_entry_into_the_next(tmp_path: Path) -> None:
    drafter = _with_corpus(tmp_path, [[3, 4], [5, 6]])
    assert chain(drafter, running(drafter, [3]), 9) == [4]


def test_a_shared_corpus_is_not_changed_by_requests(tmp_path: Path) -> None:
    drafter = _with_corpus(tmp_path, [[1, 2, 3, 1, 2]])
    states = [running(drafter, [1, 2, 3], "a"), running(drafter, [7, 1, 2, 8], "b")]
    before = vars(SuffixAutomaton([1, 2, 3, 1, 2, -1]))
    for state in states:
        chain(drafter, state, 5)
        step(drafter, state, [4, 4])
        chain(drafter, state, 5)
    assert drafter._shared is not None
    assert vars(drafter._shared) == before


@pytest.mark.parametrize(
    "line", ["{", "[1]", '{"words": 3}', '{"tokens": "ab"}', '{"tokens": [1.5]}', '{"tokens": [99]}']
)
def test_a_broken_corpus_names_file_and_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(f'{{"tokens": [1]}}\n{line}\n')
    with pytest.raises(InputError, match=r"line 2 of .*corpus\.jsonl"):
        SuffixDrafter(corpus=str(path)).bind(TARGET_INFO)


def test_a_corpus_of_text_needs_a_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "hello"}\n')
    with pytest.raises(InputError, match="holds text and there is no tokenizer"):
        SuffixDrafter(corpus=str(path)).bind(TARGET_INFO)


def test_a_missing_corpus_and_an_impossible_match_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no corpus file .*none\.jsonl"):
        SuffixDrafter(corpus=str(tmp_path / "none.jsonl")).bind(TARGET_INFO)
    with pytest.raises(InputError, match="min_match must be >= 1, got 0"):
        SuffixDrafter(min_match=0)


def _with_corpus(folder: Path, documents: Sequence[Sequence[int]]) -> SuffixDrafter:
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps({"tokens": document}) + "\n" for document in documents))
    return SuffixDrafter(min_match=1, corpus=str(path)).bind(TARGET_INFO)


def _own(state: object) -> SuffixState:
    assert isinstance(state, SuffixState)
    return state


def _inside(state: object) -> dict[str, object]:
    return dict(vars(_own(state).automaton))


def _remembering(outputs: Sequence[Sequence[int]], min_match: int, max_tokens: int = 10_000) -> SuffixDrafter:
    """A drafter that remembers these texts of nobody in particular."""
    memory = TextMemory(max_tokens)
    for output in outputs:
        memory.add(None, output)
        memory.read(len(output))
    return replace(SuffixDrafter(min_match=min_match), _memory=memory)
