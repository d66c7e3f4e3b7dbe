"""Recipes read the first prompt of every conversation of a file."""

import json

import pytest

from outrider import InputError
from recipes.questions import questions, read_prompts

LINES = [
    {"id": "a", "category": "dialogue", "turns": ["Hello.", "Hello!", "A table for two."]},
    {"id": "b", "category": "story", "prompt": "Once"},
]


def test_turns_become_messages(tmp_path):
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, LINES)))
    (_, _, chat), (id, category, text) = read_prompts(tmp_path / "prompts.jsonl")
    assert [message["role"] for message in chat] == ["user", "assistant", "user"]
    assert chat[2]["content"] == "A table for two."
    assert (id, category, text) == ("b", "story", "Once")


def test_prompts_that_are_too_long_or_taken_are_left_out(tmp_path):
    place = tmp_path / "prompts.jsonl"
    place.write_text("\n".join(json.dumps({"id": i, "category": "c", "prompt": i}) for i in ("xyz", "xy", "x")))
    two = questions(place, 2, encode=lambda text: [1] * len(text), longest=2)
    assert {each.id for each in two} == {"x", "xy"}
    [other] = questions(place, 1, encode=lambda text: [1] * len(text), longest=2, without=two[:1])
    assert other.id == two[1].id
    with pytest.raises(InputError, match="has 2 prompts of at most 2 tokens left, 3 are needed"):
        questions(place, 3, encode=lambda text: [1] * len(text), longest=2)
