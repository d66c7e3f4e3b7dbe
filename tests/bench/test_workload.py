"""Prompts are chosen evenly over their categories, and the same ones every time."""

import json

from outrider.bench.workload import Question, choose, read_prompts

COUNTS = {"story": 32, "dialogue": 60, "math": 116, "python": 6}


def questions(counts: dict[str, int]) -> list[Question]:
    return [Question(id=f"{c}/{i}", category=c, tokens=(1, 2)) for c, n in counts.items() for i in range(n)]


def tally(chosen: list[Question]) -> dict[str, int]:
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


def test_turns_become_messages(tmp_path):
    lines = [
        {"id": "a", "category": "dialogue", "turns": ["Hello.", "Hello!", "A table for two."]},
        {"id": "b", "category": "story", "prompt": "Once"},
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (_, _, chat), (id, category, text) = read_prompts(tmp_path / "prompts.jsonl")
    assert [message["role"] for message in chat] == ["user", "assistant", "user"]
    assert chat[2]["content"] == "A table for two."
    assert (id, category, text) == ("b", "story", "Once")
