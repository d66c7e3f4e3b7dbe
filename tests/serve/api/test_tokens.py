"""Log-probabilities in the formats of completions and of chats."""

import json
import math

import pytest

import outrider
from outrider.serve.api.tokens import LEAST, Offsets, Vocabulary


@pytest.fixture(scope="module")
def vocabulary(engine: outrider.Engine) -> Vocabulary:
    return Vocabulary(engine.tokenizer, engine.parts.target.vocab_size)


def test_texts_of_tokens_join_to_the_text(engine: outrider.Engine, vocabulary: Vocabulary) -> None:
    text = "Once upon a time, Mia’s cat saw 3 dogs — naïve! 猫"
    ids = engine.tokenizer(text)["input_ids"]
    joined = bytes(byte for id in ids for byte in vocabulary.bytes(id) or ())
    assert joined.decode() == text


def test_special_tokens_have_a_text_and_no_bytes(engine: outrider.Engine, vocabulary: Vocabulary) -> None:
    end = next(iter(engine.eos_ids))
    assert vocabulary.text(end) == "<|end|>"
    assert vocabulary.bytes(end) is None


def test_the_token_is_always_among_the_likeliest_and_of_one_text_the_likeliest_counts(vocabulary: Vocabulary) -> None:
    # Two bytes of multibyte characters both read as the replacement character.
    twins = [id for id in range(2000) if vocabulary.text(id) == "�"][:2]
    found = vocabulary.old_logprobs([twins[0]], [-3.0], [{twins[1]: -0.5, 300: -1.0}], offsets=[7], as_ids=False)
    assert found["top_logprobs"] == [{"�": -0.5, vocabulary.text(300): -1.0}]
    assert found["token_logprobs"] == [-3.0]
    found = vocabulary.old_logprobs([twins[0]], [-3.0], [{twins[1]: -0.5}], offsets=[7], as_ids=True)
    assert found["top_logprobs"] == [{f"token_id:{twins[0]}": -3.0, f"token_id:{twins[1]}": -0.5}]
    assert found["text_offset"] == [7]


def test_the_first_token_of_a_prompt_has_none(vocabulary: Vocabulary) -> None:
    found = vocabulary.old_logprobs([300, 301], [None, -1.0], [None, {}], offsets=[0, 2], as_ids=False)
    assert found["token_logprobs"] == [None, -1.0]
    assert found["top_logprobs"] == [None, {vocabulary.text(301): -1.0}]
    assert found["text_offset"] == [0, 2]


@pytest.mark.parametrize("special", [True, False])
def test_a_token_begins_where_the_text_before_it_ends(engine: outrider.Engine, special: bool) -> None:
    tokenizer = engine.tokenizer
    text = "<|user|>I like 😀 dogs — naïve! 猫<|user|>."
    ids = tokenizer(text)["input_ids"]
    shown = tokenizer.decode(ids, skip_special_tokens=not special)
    offsets = Offsets(tokenizer, special=special).add(ids)
    for i, (id, at) in enumerate(zip(ids, offsets, strict=True)):
        before = tokenizer.decode(ids[:i], skip_special_tokens=not special).rstrip("�")
        assert at == len(before), (i, tokenizer.decode([id]))
    assert offsets[ids.index(tokenizer(" dogs")["input_ids"][0])] == shown.index(" dogs")


def test_json_holds_every_logprob(vocabulary: Vocabulary) -> None:
    values = [-math.inf, math.nan, -1e30]
    found = vocabulary.logprobs([300] * 3, values, [{300: each} for each in values], count=1, as_ids=False)
    assert [each["logprob"] for each in found] == [LEAST] * 3
    assert "NaN" not in json.dumps(found)


def test_chats_list_the_likeliest_in_order(vocabulary: Vocabulary) -> None:
    [found] = vocabulary.logprobs([300], [-4.0], [{301: -2.0, 302: -1.0, 303: -3.0}], count=2, as_ids=False)
    assert [each["logprob"] for each in found["top_logprobs"]] == [-1.0, -2.0]
    assert found["logprob"] == -4.0
