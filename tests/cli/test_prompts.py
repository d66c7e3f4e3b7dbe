"""Prompts from standard input and files: texts, JSON lines, and what is wrong with a line."""

import io
import json
import sys

import pytest

from outrider.cli.prompts import STANDARD_INPUT, entries, is_lines, read_prompts
from outrider.cli.request import RequestOptions
from outrider.core.inputs import InputError
from outrider.core.types import Sampling
from outrider.embedded import EMBEDDED_TARGET
from tests.cli.runs import refused, run
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
    assert (status, "there is no prompt: standard input is empty" in err) == (2, True), err


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
    assert {record["prompt_index"]: len(record["tokens"]) for record in records} == {0: 4, 2: 4, 4: 4}
    sentences = sorted(line for line in err.splitlines() if line.startswith("error: "))
    assert len(sentences) == 3, err
    for said, beginning in zip(
        sentences,
        [
            "line 2 of the prompts is not a JSON object",
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
    err = refused(monkeypatch, capsys, "generate", "--target", str(tmp_path), "--prompt", "Once")
    assert err == ("error: there is no tokenizer beside the target, and a text needs one; name it with --tokenizer\n")


@pytest.mark.parametrize("closed", [False, True])
def test_without_a_prompt_nothing_is_told(monkeypatch, capsys, typed, closed):
    typed("")
    if closed:
        monkeypatch.setattr(sys, "stdin", None)
    status, out, err = run(monkeypatch, capsys, "generate", *SHORT)
    assert (status, out, err) == (
        2,
        "",
        "error: there is no prompt: standard input is empty; give --prompt or --prompt-file\n",
    )


def test_a_context_that_ends_an_output_early_is_named(monkeypatch, capsys):
    options = ["--max-context", "8", "--temperature", "0", "--drafter", "none", "--max-new-tokens", "999999999"]
    status, _, err = run(monkeypatch, capsys, "generate", "--prompt", "Once", *options)
    assert status == 0
    assert "an output ends where the context of 8 tokens is full, before max_new_tokens=999999999\n" in err


def test_more_outputs_than_memory_holds_are_refused(monkeypatch, capsys):
    status, out, err = run(monkeypatch, capsys, "generate", "--prompt", "Once", "-n", "999999999")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "n=999999999 makes 999999999 outputs" in err


def test_a_tokenizer_that_does_not_belong_to_the_target_is_named(monkeypatch, capsys, tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    options = ["--target", str(tmp_path), "--tokenizer", str(EMBEDDED_TARGET), "--drafter", "none"]
    status, out, err = run(monkeypatch, capsys, "generate", "--prompt", "Once upon a time", *options)
    assert (status, out) == (2, "Once upon a time\n") or (status, out) == (2, ""), (out, err)
    assert f"the tokenizer {EMBEDDED_TARGET} does not belong to the target" in err


def test_a_line_keeps_what_its_template_takes():
    line = {"messages": [{"role": "user", "content": "d"}], "tools": [{"name": "time"}], "question_id": 3}
    assert read_prompts(json.dumps(line)) == [{"messages": line["messages"], "tools": line["tools"]}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "d"}]}]
    assert read_prompts(json.dumps({"messages": parts})) == [parts]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ({"prompt": "a", "temperature": 0}, "line 1 of the prompts holds 'temperature', an option for all prompts"),
        ({"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}, "holds 'max_tokens'"),
        ({"prompt": "a", "tools": []}, "holds 'tools', which belongs to messages, beside a prompt"),
    ],
)
def test_what_a_line_cannot_say_is_refused_by_name(line, sentence):
    with pytest.raises(InputError, match=sentence):
        read_prompts(json.dumps(line))


def test_tools_that_the_template_does_not_read_are_refused_with_the_line(monkeypatch, capsys, tmp_path):
    file = tmp_path / "prompts.jsonl"
    line = {"messages": [{"role": "user", "content": "d"}], "tools": [{"name": "time"}]}
    file.write_text(json.dumps({"prompt": "Once"}) + "\n" + json.dumps(line) + "\n")
    status, _, err = run(monkeypatch, capsys, "generate", "--prompt-file", str(file), *SHORT, "--json")
    assert (status, err) == (
        2,
        "error: line 2 of the prompts: the target's chat template does not read tools; leave it out, or give another "
        "template\n",
    )


TOOLS = [{"type": "function", "function": {"name": "time", "parameters": {}}}]


def test_tools_of_a_file_reach_the_messages(tmp_path):
    file = tmp_path / "tools.json"
    file.write_text(json.dumps(TOOLS))
    request = RequestOptions(tools=file)
    assert request.generation(Sampling()).tools == TOOLS
    assert request.body() == {"tools": TOOLS}
    # A line may hold tools of its own.
    [prompt] = read_prompts(json.dumps({"turns": ["a"], "tools": TOOLS}))
    assert prompt == {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS}


@pytest.mark.parametrize("text", ["{}", "[]", "[1]", "{"])
def test_a_file_that_holds_no_tools_is_a_sentence(monkeypatch, capsys, typed, tmp_path, text):
    typed('{"turns": ["a"]}')
    (tmp_path / "tools.json").write_text(text)
    for command in (["generate"], ["chat"]):
        err = refused(monkeypatch, capsys, *command, "--tools", str(tmp_path / "tools.json"), *SHORT)
        assert "must hold a JSON list of tools" in err or "is not JSON" in err


def test_tools_are_for_chats_whose_template_reads_them(monkeypatch, capsys, typed, tmp_path):
    file = tmp_path / "tools.json"
    file.write_text(json.dumps(TOOLS))
    for text, sentence in (
        ("a", "tools can be given with chat messages alone"),
        ('{"turns": ["a"]}', "not read tools"),
    ):
        typed(text)
        status, _, err = run(monkeypatch, capsys, "generate", "--tools", str(file), *SHORT)
        assert (status, sentence in err) == (2, True), err
