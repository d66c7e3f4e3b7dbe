"""One setup for every way to an engine: its options, their descriptions, and its file."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider import InputError
from outrider.drafters.ngram import NgramDrafter
from outrider.lm.slots.budget import prefill_size
from outrider.setup import KINDS, Setup, documentation

NAMES = [field.name for field in fields(Setup)]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
TABLES = st.dictionaries(
    TEXTS, st.one_of(TEXTS, st.booleans(), st.integers(-9, 9), st.floats(allow_nan=False)), max_size=3
)
VALUES = {
    bool: st.booleans(),
    int: st.integers(1, 10**6),
    str: TEXTS.filter(lambda text: not text.lstrip().startswith("{")),
}


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    """Any setup that a file can hold."""
    chosen = draw(st.sets(st.sampled_from(NAMES)))
    return Setup(**{name: draw(VALUES.get(KINDS[name][0], TABLES)) for name in chosen})


def test_every_option_is_described():
    assert list(documentation(Setup)) == NAMES == list(KINDS)
    assert all(text.endswith(".") and len(text) > 10 for text in documentation(Setup).values())


@pytest.mark.parametrize("suffix", ["toml", "json"])
@given(setup=setups())
def test_a_saved_setup_is_read_back(tmp_path_factory, suffix, setup):
    file = tmp_path_factory.getbasetemp() / f"setup.{suffix}"
    setup.save(file)
    assert Setup.read(file) == setup


def test_a_saved_setup_describes_what_it_leaves_out(tmp_path):
    Setup(drafter="ngram").save(tmp_path / "setup.toml")
    text = (tmp_path / "setup.toml").read_text()
    assert 'drafter = "ngram"' in text
    assert "# Most requests at once." in text
    assert "# max_slots =" in text


def test_a_setup_that_cannot_be_written_leaves_the_old_file(tmp_path):
    file = tmp_path / "setup.toml"
    file.write_text("max_slots = 3\n")
    with pytest.raises(InputError, match=r"drafter is NgramDrafter\(.*\), which a file cannot hold; give it by name"):
        Setup(drafter=NgramDrafter()).save(file)
    with pytest.raises(UnicodeEncodeError):
        Setup(drafter="\udcff").save(file)
    assert [path.name for path in tmp_path.iterdir()] == ["setup.toml"]
    assert Setup.read(file) == Setup(max_slots=3)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        (
            "a.toml",
            'draftr = "ngram"',
            "unknown option 'draftr'; did you mean 'drafter'? Available: target, drafter, tree",
        ),
        ("a.toml", "[sampling]\nseed = 1", "unknown option 'sampling'. Available: target"),
        ("a.toml", 'max_slots = "8"', "max_slots must be a whole number, got '8'"),
        ("a.toml", "max_slots = 0", "max_slots must be >= 1, got 0"),
        ("a.toml", "allow_lossy = 1", "allow_lossy must be true or false, got 1"),
        ("a.toml", "revision = 3", "revision must be a text, got 3"),
        ("a.toml", 'quantization_config = "int8"', "quantization_config must be a JSON object, got 'int8'"),
        ("a.toml", "drafter = ", "a.toml is not TOML: Invalid value (at end of document)"),
        ("a.json", "{", "a.json is not JSON: Expecting property name"),
        ("a.json", "[]", "a.json holds no object of options"),
        ("a.json", '{"drafter": "ngram", "max_slots": 1.5}', "a.json: max_slots must be a whole number, got 1.5"),
    ],
)
def test_a_wrong_file_is_answered_in_one_sentence(tmp_path, name, text, sentence):
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError) as refused:
        Setup.read(tmp_path / name)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(InputError, match=r"there is no configuration file .*none.toml; give a TOML or JSON file"):
        Setup.read(tmp_path / "none.toml")


def test_tables_can_be_written_as_json():
    assert Setup(device_map='{"": "cpu"}') == Setup(device_map={"": "cpu"})
    assert Setup(device_map="auto").device_map == "auto"
    assert Setup(quantization_config=json.dumps({"bits": 4})).quantization_config == {"bits": 4}


def test_a_file_of_a_setup_may_be_named_by_a_text(tmp_path):
    Setup(drafter="ngram").save(f"{tmp_path}/setup.toml")
    assert Setup.read(f"{tmp_path}/setup.toml") == Setup(drafter="ngram")


def test_a_path_is_a_target():
    assert Setup(Path("models") / "target") == Setup(target="models/target")


def test_the_default_of_a_step_of_prompts_depends_on_the_device():
    assert Setup().max_prefill_tokens is None
    assert prefill_size(torch.device("cpu"), decoding=True) == 512 < prefill_size(torch.device("cpu"))
    assert prefill_size(torch.device("cuda", 0), decoding=True) == prefill_size(torch.device("cuda", 0)) == 2048
