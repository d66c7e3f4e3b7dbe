"""The recipe on what is published beside targets: both libraries say the same, and every pair is measured."""

import json

import pytest

from recipes import published
from recipes.published_pairs import Size
from tests.world.published import needs_mtp


def test_both_libraries_say_the_same_with_every_pair(tmp_path):
    needs_mtp()
    found = published.main(tmp_path, 32, 2, Size().vocab, rounds=1, max_new_tokens=12, threads=1)
    assert list(found) == [
        "gemma4, assistant",
        "glm4_moe, 1 MTP layer",
        "glm4_moe, 3 MTP layers",
        "mellum, 1 MTP layer",
        "muse_glimmer, DFlash",
    ]
    for each in found.values():
        assert each["same"]
        assert all(1 <= tokens <= 4 for tokens in each["tokens per step"].values())
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {(row["pair"], row["library"]) for row in rows} == {
        (pair, library.name) for pair in found for library in published.LIBRARIES
    }


def test_ratios_are_of_the_same_round():
    times = {"transformers": (2.0, 9.0), "outrider": (1.0, 3.0)}
    rows = [
        {"pair": "a", "library": library, "round": k, "ms": ms, "tokens": 9, "steps": 3, "same": True}
        for library, both in times.items()
        for k, ms in enumerate(both)
    ]
    found = published.summarise(rows)["a"]
    assert (found["ratio"].value, found["ratio"].low, found["ratio"].high) == pytest.approx((2.5, 2.0, 3.0))
    assert found["tokens per step"] == {"transformers": 3.0, "outrider": 3.0}
