"""A tokenizer beside a model that was made from another one has the files of the source."""

import json

import pytest

from outrider.embedded import EMBEDDED_TARGET
from outrider.lm.hf.open import open_tokenizer
from outrider.lm.hf.tokenizer_files import CONFIG, write_tokenizer

NEW = {"TokenizersBackend", "extra_special_tokens"}
"""Names that transformers 5 writes and transformers 4 does not know."""


@pytest.fixture
def source(tmp_path):
    """A folder with a tokenizer whose config names the class that transformers 4 and 5 know."""
    place = tmp_path / "source"
    open_tokenizer(str(EMBEDDED_TARGET)).save_pretrained(place)
    config = json.loads((place / CONFIG).read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["additional_special_tokens"] = config.pop("extra_special_tokens")
    (place / CONFIG).write_text(json.dumps(config))
    (place / "special_tokens_map.json").write_text(json.dumps({"eos_token": config["eos_token"]}))
    (place / "config.json").write_text("{}")
    return place


def written(tokenizer, tmp_path):
    folder = tmp_path / "made"
    folder.mkdir()
    write_tokenizer(tokenizer, folder)
    return folder


def test_the_files_are_those_of_the_source_and_no_others(source, tmp_path):
    folder = written(open_tokenizer(str(source)), tmp_path)
    theirs = {each.name: each.read_bytes() for each in source.iterdir() if each.name != "config.json"}
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == theirs


def test_a_tokenizer_that_was_changed_in_memory_is_written_as_it_is_now(source, tmp_path):
    tokenizer = open_tokenizer(str(source))
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|tool|>"]})
    again = open_tokenizer(str(written(tokenizer, tmp_path)))
    assert again.get_vocab() == tokenizer.get_vocab()
    assert "<|tool|>" in again.all_special_tokens


@pytest.mark.parametrize("has_files", [True, False])
def test_no_config_has_names_that_transformers_4_does_not_know(source, tmp_path, has_files):
    tokenizer = open_tokenizer(str(source))
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|tool|>"]})
    tokenizer.save_pretrained(source)
    tokenizer = open_tokenizer(str(source))
    if not has_files:
        tokenizer.name_or_path = ""
    folder = written(tokenizer, tmp_path)
    config = json.loads((folder / CONFIG).read_text())
    assert not NEW & {config["tokenizer_class"], *config}
    assert open_tokenizer(str(folder)).all_special_tokens == tokenizer.all_special_tokens
