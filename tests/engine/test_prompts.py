"""Prompts become the token ids that the tokenizer's own template gives; nothing in them is dropped without a word."""

import json
from typing import Any

import pytest
import torch
from transformers import BatchEncoding

import outrider
from outrider import InputError, Sampling
from outrider.engine.engine import Engine
from outrider.engine.prompts import encode, encode_text
from tests.world.tokenizers import byte_level

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% if documents %}<{{ documents[0].text }}>{% endif %}"
    "{% if shout %}LOUD {% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "time", "description": "now", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def engine() -> Engine:
    made = outrider.load(drafter="none", forward="eager")
    assert made.tokenizer is not None
    made.tokenizer.chat_template = TEMPLATE
    return made


def said(engine: Engine, prompt: Any, **options: Any) -> str:
    return str(engine.tokenizer.decode(engine.encode(prompt, **options)))  # type: ignore[union-attr]


def test_tools_documents_and_arguments_of_the_template_reach_it(engine):
    assert said(engine, HELLO) == "[user]Hello[assistant]"
    assert '"name": "time"' in said(engine, HELLO, tools=[TOOL])
    assert said(engine, HELLO, documents=[{"text": "abc"}]).startswith("<abc>")
    assert said(engine, HELLO, chat_template_kwargs={"shout": True}).startswith("LOUD ")
    whole = {"messages": HELLO, "tools": [TOOL], "chat_template_kwargs": {"shout": True}}
    assert engine.encode(whole) == engine.encode(HELLO, tools=[TOOL], chat_template_kwargs={"shout": True})


def test_tools_change_what_is_generated_from(engine):
    plain, [out] = engine.encode(HELLO), engine.generate([HELLO], tools=[TOOL], max_new_tokens=1)
    assert out.prompt_tokens > len(plain)
    [update] = [u for u in engine.stream(HELLO, tools=[TOOL], max_new_tokens=1) if u.output is not None]
    assert update.output.prompt_tokens == out.prompt_tokens


def test_a_last_message_of_the_assistant_is_continued(engine):
    assert said(engine, [*HELLO, {"role": "assistant", "content": "The dog"}]) == "[user]Hello[assistant]The dog"


def test_parts_of_text_are_one_text(engine):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert said(engine, [{"role": "user", "content": parts}]) == "[user]Hello[assistant]"


@pytest.mark.parametrize("tensors", [None, "pt", "np"])
def test_what_a_tokenizer_returns_is_a_prompt(engine, tensors):
    given = engine.tokenizer(["Once upon"] if tensors else "Once upon", return_tensors=tensors)
    assert isinstance(given, BatchEncoding)
    assert engine.encode(given) == engine.encode(dict(given)) == engine.encode("Once upon")


def test_a_padded_batch_of_a_tokenizer_is_a_list_of_prompts(engine):
    texts = ["Once upon a time", "One"]
    batch = engine.tokenizer(texts, return_tensors="pt", padding=True)
    greedy = Sampling(temperature=0)
    found, alone = (engine.generate(each, max_new_tokens=4, sampling=greedy) for each in (batch, texts))
    assert [out.tokens for out in found] == [out.tokens for out in alone]
    assert found[0].prompt_tokens > found[1].prompt_tokens


@pytest.mark.parametrize(
    ("prompt", "options", "sentence"),
    [
        ({"messages": HELLO, "tools": "time"}, {}, "tools must be a list of JSON objects, got 'time'"),
        ({"messages": HELLO, "tools": [3]}, {}, "tools must be a list of JSON objects"),
        ({"messages": HELLO, "documents": {}}, {}, "documents must be a list of JSON objects"),
        ({"messages": HELLO, "chat_template_kwargs": [1]}, {}, "chat_template_kwargs must be a JSON object"),
        (HELLO, {"chat_template_kwargs": {"think": True}}, "the target's chat template does not read think; leave"),
        (HELLO, {"chat_template_kwargs": {"tokenize": False}}, "'tokenize', which is no argument of a template"),
        ("Hello", {"tools": [TOOL]}, "tools can be given with chat messages alone; this prompt is 'Hello'"),
        ([1, 2], {"documents": [{}]}, "documents can be given with chat messages alone"),
        ({"messages": HELLO, "tools": [TOOL]}, {"tools": [TOOL]}, "tools is given with the messages and as an option"),
        ({"messages": HELLO, "functions": []}, {}, "this holds 'functions'"),
        ({"messages": "Hello"}, {}, "messages must be a list of chat messages, got 'Hello'"),
        ({"messages": []}, {}, "messages must be a list of chat messages"),
        ({"text": "Hello"}, {}, "a prompt that is a mapping holds messages, or input_ids .* this holds 'text'"),
        ({}, {}, "this holds neither"),
        ({"input_ids": [[1], [2]]}, {}, "a prompt is one row of token ids, got 2 rows"),
        ({"input_ids": ["a"]}, {}, "a prompt is"),
        ({"input_ids": [1, 2], "attention_mask": [1]}, {}, "attention_mask has 1 marks for 2 tokens"),
        ({"input_ids": [1], "pixel_values": [0]}, {}, "this holds 'pixel_values'"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], {}, "a part of a chat message must be a text"),
        ([{"role": "user", "content": 3}], {}, "the content of a chat message is a text or a list of parts, got 3"),
        ([*HELLO, {"role": "assistant", "tool_calls": [{}]}], {}, "holds no text to continue"),
    ],
    ids=lambda value: json.dumps(value)[:60] if not isinstance(value, str) else value[:30],
)
def test_what_would_be_dropped_is_refused(engine, prompt, options, sentence):
    with pytest.raises(InputError, match=sentence):
        engine.encode(prompt, **options)


def test_a_template_without_tools_refuses_them():
    engine = outrider.load(drafter="none", forward="eager")
    with pytest.raises(InputError, match="the target's chat template does not read tools"):
        engine.encode(HELLO, tools=[TOOL])


def test_prompts_of_a_single_row_are_no_batch(engine):
    with pytest.raises(InputError, match=r"for one prompt give \[prompt\]"):
        engine.generate({"input_ids": [1, 2]})
    assert engine.encode({"input_ids": torch.tensor([[1, 2]])}) == [1, 2]


def test_an_empty_text_is_the_token_that_begins_texts_where_there_is_one():
    begins = byte_level(300, begin="<|begin|>")
    assert encode("", begins) == [begins.bos_token_id]
    assert encode_text("", begins, special=False) == []
    assert encode("", byte_level(300)) == []
