"""Prompts from standard input and files: texts, JSON lines, and what is wrong with a line."""

import io
import json
import sys

import pytest

from outrider.cli.prompts import STANDARD_INPUT, entries, is_lines, read_prompts
from outrider.core.inputs import InputError
from tests.cli.runs import run
from tests.world.zoo import tiny

SHORT = ["--max-new-tokens", "4", "--temperature", "0", "--drafter", "none"]
LINES = '{"prompt": "Once"}\n{"turns": ["a", "b", "c"]}\n{"messages": [{"role": "system", "content": "d"}]}\n'


@pytest.fixture
def typed(monkeypatch):
    """Lets a text be what stands on standard input."""

    def given(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))

    return given


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_the_line_end_behind_a_piped_text_is_no_part_of_the_prompt(monkeypatch, capsys, typed, end):
    typed("Once upon a time" + end)
    status, out, err = run(monkeypatch, capsys, "generate", *SHORT)
    assert (status, out.startswith("Once upon a time, ")) == (0, True), (out, err)


def test_line_ends_before_the_last_are_part_of_the_prompt(typed):
    typed("one\ntwo\n\n")
    assert [entry.prompt for entry in entries((), None)] == ["one\ntwo\n"]


@pytest.mark.parametrize("file", [None, STANDARD_INPUT])
def test_json_lines_on_standard_input_are_prompts(typed, file):
    typed(LINES)
    roles = [{"role": r, "content": c} for r, c in zip(("user", "assistant", "user"), "abc", strict=True)]
    assert [entry.prompt for entry in entries((), file)] == ["Once", roles, [{"role": "system", "content": "d"}]]


@pytest.mark.parametrize("text", ['{"name": "Tim",', '{"name": "Tim"}', "[1, 2]", "{", "Once\n" + LINES])
def test_other_texts_are_one_prompt(typed, text):
    assert not is_lines(text)
    typed(text)
    assert [entry.prompt for entry in entries((), None)] == [text.removesuffix("\n")]


def test_standard_input_that_is_asked_for_may_not_be_missing(monkeypatch, capsys, typed):
    typed("")
    status, _, err = run(monkeypatch, capsys, "generate", "--prompt-file", "-", *SHORT)
    assert (status, "the prompt is empty" in err) == (2, True), err


@pytest.mark.parametrize(
    "line",
    [
        '{"messages": []}',
        '{"messages": "Hello"}',
        '{"messages": ["Hello"]}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"content": "Hello"}]}',
        '{"messages": [{"role": "user", "content": null}]}',
        '{"prompt": "a", "turns": ["b"]}',
    ],
)
def test_messages_without_role_or_content_are_named(line):
    with pytest.raises(InputError, match=r"line 1 of the prompts is not a JSON object with .* role and content"):
        read_prompts(line)


def test_a_bad_prompt_is_named_by_its_line_and_does_not_void_the_others(monkeypatch, capsys, tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "Once"}, {"prompt": 3}, {"prompt": ""}, {"prompt": "word " * 1200}, {"prompt": "One day"}]
    file.write_text("\n".join(json.dumps(line) for line in lines) + '\n{"prompt"')
    status, out, err = run(monkeypatch, capsys, "generate", "--prompt-file", str(file), *SHORT, "--json")
    records = [json.loads(line) for line in out.splitlines()]
    assert {record["prompt_index"]: len(record["tokens"]) for record in records} == {0: 4, 4: 4}
    sentences = sorted(line for line in err.splitlines() if line.startswith("error: "))
    assert len(sentences) == 4, err
    for said, beginning in zip(
        sentences,
        [
            "line 2 of the prompts is not a JSON object",
            "line 3 of the prompts: the prompt is empty",
            "line 4 of the prompts: the prompt has",
            "line 6 of the prompts is not JSON",
        ],
        strict=True,
    ):
        assert said.startswith(f"error: {beginning}")
    assert status == 2


def test_what_is_wrong_with_all_requests_is_said_once(monkeypatch, capsys, tmp_path):
    given = ["--prompt", "Once", "--prompt", "One day", "--stop", ""]
    status, out, err = run(monkeypatch, capsys, "generate", *given)
    assert (status, out, err) == (2, "", "error: a stop string must not be empty\n")


def test_a_missing_tokenizer_is_one_sentence(monkeypatch, capsys, tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    status, out, err = run(monkeypatch, capsys, "generate", "--target", str(tmp_path), "--prompt", "Once")
    assert (status, out) == (2, "")
    assert err == ("error: there is no tokenizer beside the target, and a text needs one; name it with --tokenizer\n")
