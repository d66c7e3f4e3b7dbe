"""Texts of ended requests are kept apart by owner, read bit by bit, and forgotten when they are not used."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.automaton import SEPARATOR, SuffixAutomaton
from outrider.drafters.memory import KnownTexts, TextMemory

ALL = 1 << 20


def text(number: int, size: int = 10) -> list[int]:
    """A text that shares no token with others."""
    return list(range(size * number, size * (number + 1)))


def filled(max_tokens: int, *numbers: int, owner: str | None = None) -> TextMemory:
    memory = TextMemory(max_tokens)
    for number in numbers:
        memory.add(owner, text(number))
        memory.read(ALL)
    return memory


def where(memory: TextMemory, number: int, owner: str | None = None) -> KnownTexts | None:
    """The part of the memory that knows a text."""
    known = [each for each in memory.known(owner) if each.automaton.match(text(number))[1] == len(text(number))]
    return known[0] if known else None


def remembered(memory: TextMemory, *numbers: int) -> list[int]:
    return [number for number in numbers if where(memory, number) is not None]


def test_a_text_is_known_to_its_owner_alone() -> None:
    memory = filled(100, 1, owner="a")
    assert where(memory, 1, "a") is not None
    assert where(memory, 1, "b") is None
    assert where(memory, 1) is None


def test_the_texts_that_were_used_longest_ago_are_forgotten_first() -> None:
    assert remembered(filled(40, 1, 2, 3, 4), 1, 2, 3, 4) == [1, 2, 3, 4]
    assert remembered(filled(40, 1, 2, 3, 4, 5), 1, 2, 3, 4, 5) == [3, 4, 5]


def test_a_text_that_was_used_is_kept_longer_than_newer_ones_that_were_not() -> None:
    memory = filled(40, 1, 2, 3)
    older = where(memory, 1)
    assert older is not None
    memory.use(older, older.automaton.size - 3)
    memory.use(older, older.automaton.size - 4)
    memory.read(ALL)
    assert memory.num_read == 40, "it is read once more, and not twice"
    memory.add(None, text(4))
    memory.read(ALL)
    assert remembered(memory, 1, 2, 3, 4) == [2, 3, 4]


@pytest.mark.parametrize("place", [0, 9, 11, 20])
def test_a_place_belongs_to_the_text_that_stands_there(place: int) -> None:
    memory = filled(40, 1, 2, 3)
    older = where(memory, 1)
    assert older is not None
    memory.use(older, place)
    memory.read(ALL)
    for number in (4, 5):
        memory.add(None, text(number))
        memory.read(ALL)
    kept = 1 if place < 10 else 2
    assert remembered(memory, 1, 2, kept, 5) == [kept, kept, 5]


def test_owners_share_the_limit() -> None:
    memory = TextMemory(40)
    for number, owner in enumerate("abcde"):
        memory.add(owner, text(number))
        memory.read(ALL)
    known = [owner for number, owner in enumerate("abcde") if where(memory, number, owner) is not None]
    assert known == ["c", "d", "e"]


def test_equal_texts_are_read_once() -> None:
    memory = filled(100, 1, 1)
    memory.add(None, text(2))
    memory.add(None, text(2))
    memory.read(ALL)
    assert memory.num_read == 20


@given(chunks=st.lists(st.integers(1, 9), max_size=20), numbers=st.lists(st.integers(0, 5), max_size=9))
def test_each_call_reads_at_most_what_it_may_and_all_is_read_in_the_end(chunks: list[int], numbers: list[int]) -> None:
    memory, whole = TextMemory(ALL), SuffixAutomaton()
    for number in dict.fromkeys(numbers):
        for token in [*text(number), SEPARATOR]:
            whole.append(token)
    for number in numbers:
        memory.add(None, text(number))
    for chunk in chunks:
        before = memory.num_read
        memory.read(chunk)
        assert memory.num_read - before <= chunk
    memory.read(ALL)
    assert memory.num_read == 10 * len(set(numbers))
    assert [vars(known.automaton) for known in memory.known(None)] == ([vars(whole)] if numbers else [])


def test_a_half_read_text_is_known_up_to_there() -> None:
    memory = TextMemory(100)
    memory.add(None, text(1))
    memory.read(4)
    [known] = memory.known(None)
    assert known.automaton.match(text(1)[:4])[1] == 4
    assert known.automaton.match(text(1))[1] == 0


def test_where_nobody_reads_texts_do_not_pile_up() -> None:
    memory = TextMemory(40)
    memory.add(None, text(0))
    memory.read(3)
    for number in range(1, 50):
        memory.add(None, text(number))
    memory.read(ALL)
    assert memory.num_read <= 30
    assert where(memory, 49) is not None


def test_of_a_long_text_the_newest_half_of_the_limit_is_kept() -> None:
    memory = TextMemory(40)
    memory.add(None, list(range(90)))
    memory.read(ALL)
    assert memory.num_read == 20
    [known] = memory.known(None)
    assert known.texts == [tuple(range(70, 90))]


def test_nothing_is_remembered_with_no_room_or_after_forgetting() -> None:
    assert filled(0, 1, 2).known(None) == []
    memory = filled(100, 1)
    memory.add(None, text(2))
    memory.forget()
    memory.read(ALL)
    assert memory.known(None) == []
