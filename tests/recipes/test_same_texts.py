"""Texts of packed weights are the same with and without drafts, and a text that leaves the float32 model is told."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.embedded import EMBEDDED_DRAFT, EMBEDDED_TARGET
from recipes import same_texts
from recipes.same_texts import differences, gaps


def test_drawn_texts_are_compared_with_those_of_the_same_drafter():
    plain = {"drafter": "none", "batch": 1, "threads": 1, "texts": [[5, 6]]}
    drafted = plain | {"drafter": "suffix", "texts": [[5, 7]]}
    rows = [plain, drafted, drafted | {"batch": 4, "texts": [[5, 7, 8]]}]
    assert [(each["batch"], each["token"]) for each in differences(rows, greedy=False)] == [(4, 2)]
    assert [(each["batch"], each["token"]) for each in differences(rows)] == [(1, 1), (4, 1)]


def test_a_text_that_leaves_the_model_has_a_gap_there():
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_DRAFT, dtype=torch.float32)
    prompt, text = [5, 6, 7], []
    with torch.inference_mode():
        for _ in range(4):
            text.append(int(model(torch.tensor([[*prompt, *text]])).logits[0, -1].argmax()))
    other = [*text[:2], text[2] + 1, text[3]]
    [left] = gaps(str(EMBEDDED_DRAFT), [prompt, prompt], [text, other])
    assert (left["prompt"], left["token"]) == (1, 2)
    assert left["gap"] > 0


def test_the_recipe_counts_texts_of_a_packed_file(tmp_path, monkeypatch):
    files = pytest.importorskip("tests.world.gguf_files")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_DRAFT, dtype=torch.float32)
    file = files.write_gguf(tmp_path / "target.gguf", model, AutoTokenizer.from_pretrained(EMBEDDED_TARGET))
    same_texts.main(target=str(file), out=tmp_path / "out", **(same_texts.QUICK | {"max_new_tokens": 48}))
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert [(row["drafter"], row["batch"]) for row in rows] == [("none", 1), ("none", 4), ("suffix", 1), ("suffix", 4)]
    assert sum(row["accepted"] for row in rows) > 0
