"""Reasoning, content and tool calls told apart, wherever the text is cut into pieces."""

import json
from collections.abc import Sequence

import pytest

import outrider
from outrider.core.inputs import InputError
from outrider.serve.run import parser
from outrider.serve.run.outputs import joined
from outrider.serve.run.parser import ForcedReader, OutputParser, OutputReader, Piece, PlainReader

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
XML = """<tool_call>
<function=weather>
<parameter=city>
Oslo
</parameter>
<parameter=days>
2
</parameter>
</function>
</tool_call>"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}


def read(reader: OutputReader, parts: Sequence[str], *, cut: bool = False) -> list[Piece]:
    found = [piece for part in parts for piece in reader.feed(part)] + reader.end(cut=cut)
    return joined(found)


def said(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    return [(piece.kind, piece.text) for piece in pieces]


def known(engine: outrider.Engine, chat_template: str, monkeypatch: pytest.MonkeyPatch) -> OutputParser:
    monkeypatch.setattr(engine.tokenizer, "chat_template", chat_template)
    return OutputParser.of(engine.tokenizer, "auto")


@pytest.mark.parametrize(
    ("marks", "call"), [("{{ '<tool_call>' }}", CALL), ("{{ '<tool_call><function=' }}", XML)], ids=["json", "xml"]
)
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_known_templates_read_reasoning_content_and_calls(
    engine: outrider.Engine, monkeypatch: pytest.MonkeyPatch, marks: str, call: str, size: int
) -> None:
    reading = known(engine, marks, monkeypatch)
    text = f"<think>\nHm.</think>\n\nI look.\n{call}\n{call}<|im_end|>"
    reader = reading_at(reading, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    pieces = read(reader, [text[i : i + size] for i in range(0, len(text), size)])
    assert said(pieces)[:2] == [("reasoning", "Hm."), ("content", "I look.")]
    calls = pieces[2:]
    assert [(piece.kind, piece.call, piece.name) for piece in calls] == [("call", 0, "weather"), ("call", 1, "weather")]
    assert [json.loads(piece.text) for piece in calls] == [{"city": "Oslo", "days": 2}] * 2
    assert len({piece.id for piece in calls}) == 2
    assert reader.failures == 0


def reading_at(reading: OutputParser, prompt: str) -> OutputReader:
    assert reading.template is not None
    return parser.TemplateReader(reading.tokenizer, reading.template, prompt, [WEATHER])


def test_reasoning_that_the_prompt_opened_is_reasoning(
    engine: outrider.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = known(engine, "</think>", monkeypatch)
    assert reading.thinking == ("<think>", "</think>")
    opened = reading_at(reading, "user: <think>old</think> new\nassistant:<think>\n")
    assert opened.reasons
    assert said(read(opened, ["Hm", ".</thi", "nk>\n\nYes"])) == [("reasoning", "Hm."), ("content", "Yes")]
    closed = reading_at(reading, "assistant:<think>\n\n</think>\n\n")
    assert not closed.reasons
    assert said(read(closed, ["Yes"])) == [("content", "Yes")]


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_call_that_cannot_be_read_is_content(
    engine: outrider.Engine, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    reading = known(engine, "<tool_call>", monkeypatch)
    reader = reading_at(reading, "<|im_start|>assistant\n")
    text = "Look: <tool_call>{weather}</tool_call> and more"
    pieces = read(reader, [text[i : i + size] for i in range(0, len(text), size)])
    assert said(pieces) == [("content", text)]
    assert reader.failures == 1


def test_a_call_that_was_cut_off_is_content(engine: outrider.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = known(engine, "<tool_call>", monkeypatch)
    reader = reading_at(reading, "<|im_start|>assistant\n")
    assert said(read(reader, ['<tool_call>{"name": "wea'], cut=True)) == [("content", '<tool_call>{"name": "wea')]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_forced_call_streams_its_arguments(size: int) -> None:
    text = ' {"name": "a\\"b", "parameters" : {"x": {"y": "}"}}\n}\n'
    reader = ForcedReader(inner=PlainReader(), name=None)
    pieces = read(reader, [text[i : i + size] for i in range(0, len(text), size)])
    assert [(piece.kind, piece.name, piece.text) for piece in joined(pieces)] == [("call", 'a"b', '{"x": {"y": "}"}}')]


def test_a_forced_call_that_was_cut_off_keeps_all_of_its_text() -> None:
    reader = ForcedReader(inner=PlainReader(), name=None)
    [piece] = read(reader, ['{"name": "f", "parameters": {"x": {}'], cut=True)
    assert piece.text == '{"x": {}'
    early = ForcedReader(inner=PlainReader(), name=None)
    assert said(read(early, ['{"na'], cut=True)) == [("content", '{"na')]


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_list_of_forced_calls_is_told_apart(size: int) -> None:
    calls = (("f", '{"x": "},{"}'), ("g", '[1, "]"]'), ("f", "3"))
    text = "[" + ", ".join(f'{{"name": "{name}", "parameters": {value}}}' for name, value in calls) + "]"
    reader = ForcedReader(inner=PlainReader(), name=None)
    pieces = read(reader, [text[i : i + size] for i in range(0, len(text), size)])
    wanted = [(i, name, value) for i, (name, value) in enumerate(calls)]
    assert [(piece.call, piece.name, piece.text) for piece in pieces] == wanted
    assert len({piece.id for piece in pieces}) == 3


def test_a_prompt_with_a_call_that_cannot_be_read_is_no_error(
    engine: outrider.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = known(engine, "<tool_call>", monkeypatch)
    reader = reading_at(reading, "<|im_start|>assistant\n<tool_call>{weather}</tool_call>")
    assert said(read(reader, ["Yes"])) == [("content", "Yes")]


def test_marks_of_calls_are_those_of_json_templates(engine: outrider.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert known(engine, "<tool_call>", monkeypatch).call_marks == ("<tool_call>", "</tool_call>")
    assert known(engine, "<tool_call><function=", monkeypatch).call_marks is None
    assert known(engine, "nothing", monkeypatch).call_marks is None


def test_a_named_call_is_its_arguments() -> None:
    reader = ForcedReader(inner=PlainReader(), name="f")
    [piece] = read(reader, ['{"x"', ": 1}"])
    assert (piece.kind, piece.name, piece.text, piece.call) == ("call", "f", '{"x": 1}', 0)


def test_a_wrong_template_is_refused(engine: outrider.Engine) -> None:
    with pytest.raises(InputError, match="response template"):
        OutputParser.of(engine.tokenizer, {"fields": {}})


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("opening", ["<think>\n\n</think>\n\n", "Sure: ", "\n", ""])
def test_the_end_of_the_prompt_is_no_part_of_the_answer(
    engine: outrider.Engine, monkeypatch: pytest.MonkeyPatch, opening: str, size: int
) -> None:
    """White space at the end of a prompt may begin the mark of a call, so the parser holds it back."""
    for text, wanted in (
        ("Hello", [("content", "Hello")]),
        ("\n Hello\n", [("content", "\n Hello\n")]),
        (f"I look.\n{CALL}", [("content", "I look."), ("call", '{"city": "Oslo", "days": 2}')]),
        (CALL, [("call", '{"city": "Oslo", "days": 2}')]),
        ("See <tool_call>{x}</tool_call>", [("content", "See <tool_call>{x}</tool_call>")]),
    ):
        reader = reading_at(known(engine, "<tool_call>", monkeypatch), f"<|im_start|>assistant\n{opening}")
        assert said(read(reader, [text[i : i + size] for i in range(0, len(text), size)])) == wanted
        assert reader.failures == ("{x}" in text)


BARE = '{"name": "weather", "arguments": {"city": "Oslo", "note": "}{\\u00e9\\"", "days": -2, "dry": true}}'


def bare(engine: outrider.Engine, monkeypatch: pytest.MonkeyPatch) -> OutputReader:
    reading = known(engine, "<tool_call>", monkeypatch)
    return reading.reader(engine.encode("assistant"), [WEATHER], None)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("text", [BARE, f"\n{BARE}\n", BARE.replace("arguments", "parameters")])
def test_an_answer_that_is_a_call_without_marks_is_a_call(
    engine: outrider.Engine, monkeypatch: pytest.MonkeyPatch, text: str, size: int
) -> None:
    reader = bare(engine, monkeypatch)
    [piece] = read(reader, [text[i : i + size] for i in range(0, len(text), size)])
    assert (piece.kind, piece.name) == ("call", "weather")
    assert json.loads(piece.text) == json.loads(BARE)["arguments"]


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("Hello", ""),
        (" {name}", " {"),
        ('{"city": "Oslo"}', '{"'),
        ('{"name": "other", "arguments": {}}', '{"name": "other'),
        ('{"name": "weather", "arguments": [1]}', '{"name": "weather", "arguments": [1]'),
        ('{"name": "weather", "arguments": {}, "more": 1}', '{"name": "weather", "arguments": {}, "more": 1'),
        ('{"name": "weather", "arguments": {}} Done.', '{"name": "weather", "arguments": {}} '),
        ('{"name": "weather", oops', '{"name": "weather", '),
    ],
)
def test_other_content_comes_unchanged_and_is_held_back_only_while_it_can_be_a_call(
    engine: outrider.Engine, monkeypatch: pytest.MonkeyPatch, text: str, held: str
) -> None:
    for size in (1, 4, 1000):
        reader = bare(engine, monkeypatch)
        assert said(read(reader, [text[i : i + size] for i in range(0, len(text), size)])) == [("content", text)]
    reader = bare(engine, monkeypatch)
    assert read_now(reader, held) == ""
    assert read_now(reader, text[len(held) :]) == text


def read_now(reader: OutputReader, text: str) -> str:
    return "".join(piece.text for letter in text for piece in reader.feed(letter))


def test_a_call_with_marks_follows_content_that_was_held_back(
    engine: outrider.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = read(bare(engine, monkeypatch), [f"{{{CALL}"])
    assert [(piece.kind, piece.name) for piece in pieces] == [("content", None), ("call", "weather")]
    cut = BARE[:20]
    assert said(read(bare(engine, monkeypatch), [cut], cut=True)) == [("content", cut)]
