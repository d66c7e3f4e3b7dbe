"""Architectures: those that needed something of their own are right, and the page says what is so now."""

from importlib.metadata import version
from pathlib import Path

import pytest

from outrider.bench.folder import read_rows
from outrider.lm.hf.support import refusal
from recipes import zoo
from recipes.tiny import MODEL_TYPES, Float64, tiny_config

ROOT = Path(__file__).parent.parent.parent
ROWS = read_rows(ROOT / "measurements" / "architectures" / "rows.jsonl")
PAGE = (ROOT / "docs" / "laboratory" / "architectures.md").read_text(encoding="utf-8")
KNOWN_VERSION = pytest.mark.skipif(
    version("transformers") not in {row["transformers"] for row in ROWS},
    reason="no row of the page was made with this version of transformers",
)
NEW = pytest.mark.skipif("lfm3" not in MODEL_TYPES, reason="younger than the oldest transformers supported")


@pytest.mark.parametrize(
    ("model_type", "trees"),
    [
        ("got_ocr2", True),  # a wrapper whose own class does not know sdpa
        ("hrm_text", True),  # asks its cache whether it is initialised
        pytest.param("lfm3", False, marks=NEW),  # recurrent layers beside two kinds of attention
        ("longcat_flash", True),  # two attention layers in one decoder layer
        ("mllama", True),  # looks in its cache for what images left
        ("gemma4_text", True),  # head sizes by layer, shared keys
    ],
)
def test_outputs_are_what_the_model_says_by_itself(model_type, trees):
    with Float64():
        row = zoo.judge(model_type)
    assert zoo.right(row), row
    assert row["generate reads alike"]
    assert ("trees" in row) == trees
    assert all(0 < row[way]["accepted"] < row[way]["drafted"] for way in zoo.WAYS if way in row), row


def test_windows_that_are_a_matter_of_another_module_are_seen():
    with Float64():
        row = zoo.judge("idefics2")
    assert zoo.right(row), row


def test_a_model_that_transformers_reads_in_two_ways_is_followed_where_it_reads_a_whole_text():
    with Float64():
        row = zoo.judge("moshi")
    assert zoo.right(row), row
    assert not row["generate reads alike"]


def test_what_gives_other_outputs_than_alone_is_wrong_and_shown():
    way = {"identical": True, "batch": False, "accepted": 1, "drafted": 2}
    row = {"model_type": "x", "variant": "", "transformers": "5", "attention": "sdpa", "generate reads alike": True}
    assert not zoo.right(row | {"chains": way})
    assert "| x | no | no | no | as it is: outputs differ |" in zoo.markdown([row | {"chains": way}])
    assert "| x | no | no | no | as it is: lost |" in zoo.markdown([row | {"crashed": "lost"}])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_that_crashes_or_hangs_is_a_row():
    assert "KeyError" in zoo.apart({"model_type": "nonesuch"}, 60)["crashed"]
    assert zoo.apart({"model_type": "llama"}, 0.0) == {"crashed": "no answer within 0 s"}


def test_the_page_is_made_from_its_rows_and_nothing_in_them_is_wrong():
    assert zoo.markdown(ROWS) == PAGE
    assert [row for row in ROWS if not zoo.right(row) and not {"refused", "untried"} & set(row)] == []


@KNOWN_VERSION
def test_every_architecture_has_a_row_and_is_refused_with_the_sentence_in_it():
    assert {row["model_type"] for row in ROWS if not row["variant"]} == set(MODEL_TYPES)
    for row in ROWS:
        if not row["variant"] and "untried" not in row:
            assert refusal(tiny_config(row["model_type"])) == row.get("refused")
