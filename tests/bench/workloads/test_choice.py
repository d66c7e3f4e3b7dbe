"""Prompts are chosen evenly over their categories, and the same ones every time."""

from outrider.bench.workloads.choice import choose
from outrider.bench.workloads.conversation import Conversation

COUNTS = {"story": 32, "dialogue": 60, "math": 116, "python": 6}


def questions(counts: dict[str, int]) -> list[Conversation]:
    return [Conversation(id=f"{c}/{i}", category=c, opening=(1, 2)) for c, n in counts.items() for i in range(n)]


def tally(chosen: list[Conversation]) -> dict[str, int]:
    return {c: sum(q.category == c for q in chosen) for c in COUNTS}


def test_prompts_are_balanced_and_the_others_fill_up():
    assert tally(choose(questions(COUNTS), 24)) == dict.fromkeys(COUNTS, 6)
    assert tally(choose(questions(COUNTS), 48)) == {"story": 14, "dialogue": 14, "math": 14, "python": 6}
    assert len(choose(questions(COUNTS), 1000)) == sum(COUNTS.values())


def test_prompts_are_distinct_and_the_same_every_time():
    first = choose(questions(COUNTS), 48)
    assert len({q.id for q in first}) == 48
    assert choose(questions(COUNTS), 48) == first
    assert choose(questions(COUNTS), 48, seed=1) != first
