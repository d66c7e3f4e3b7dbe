"""A conversation: its commands, its settings, and what is wrong with a line."""

import shutil

import pytest

from outrider.embedded import EMBEDDED_TARGET
from tests.cli.runs import run
from tests.world.zoo import tiny

SHORT = ["--max-new-tokens", "4", "--temperature", "0", "--drafter", "none"]


def talk(monkeypatch, capsys, *lines: str, options: tuple[str, ...] = ()) -> tuple[int, str, str]:
    """Exit status, answers and remarks of a conversation."""
    said = iter(lines)
    monkeypatch.setattr("builtins.input", lambda: next(said, "/quit"))
    return run(monkeypatch, capsys, "chat", *SHORT, *options)


def test_help_names_every_command(monkeypatch, capsys):
    status, out, err = talk(monkeypatch, capsys, "/help")
    assert (status, out) == (0, "")
    assert all(command in err for command in ("/help", "/settings", "/set NAME VALUE", "/reset", "/quit"))


def test_settings_are_shown_and_set(monkeypatch, capsys):
    lines = ["/set max_new_tokens 2", "/set stop x", "/set top-p 0.5", "/set ignore_eos true", "/settings", "Hello."]
    status, _, err = talk(monkeypatch, capsys, *lines)
    assert status == 0
    for line in ("max_new_tokens = 2", "stop = ('x',)", "top_p = 0.5", "ignore_eos = True", "temperature = 0.0"):
        assert line in err, err
    assert "[2 tokens," in err


def test_a_setting_without_a_value_is_as_at_the_beginning(monkeypatch, capsys):
    _, _, err = talk(monkeypatch, capsys, "/set max_new_tokens 2", "/set max_new_tokens", "/settings")
    assert "max_new_tokens = 4" in err


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("/set temprature 1", "unknown setting 'temprature'; did you mean 'temperature'?"),
        ("/set temperature hot", "temperature must be a number, got 'hot'"),
        ("/set top_k 1.5", "top_k must be a whole number, got '1.5'"),
        ("/set ignore_eos maybe", "ignore_eos must be true or false, got 'maybe'"),
        ("/set temperature -1", "temperature must be >= 0 (0 means greedy), got -1.0"),
        ("/set stop_token_ids x", "stop_token_ids must be a whole number, got 'x'"),
        ("/set grammar /no/such/file", "there is no grammar file /no/such/file"),
        ("/set", "unknown setting ''"),
        ("/sett", "unknown command '/sett'; did you mean '/set"),
    ],
)
def test_what_is_wrong_with_a_command_ends_nothing(monkeypatch, capsys, line, sentence):
    status, _, err = talk(monkeypatch, capsys, line, "Hello.")
    assert (status, f"error: {sentence}" in err) == (0, True), err
    assert "4 tokens" in err


def test_a_message_may_begin_with_a_slash(monkeypatch, capsys):
    status, _, err = talk(monkeypatch, capsys, "/usr/bin is where it is.")
    assert (status, "4 tokens" in err) == (0, True), err


def test_a_broken_template_is_one_sentence(monkeypatch, capsys, tmp_path):
    shutil.copytree(EMBEDDED_TARGET, tmp_path / "target")
    (tmp_path / "target" / "chat_template.jinja").write_text("{% if")
    status, out, err = talk(monkeypatch, capsys, "Hello.", options=("--target", str(tmp_path / "target")))
    assert (status, out) == (2, "")
    assert err.startswith("error: the target's chat template makes no prompt of a conversation: unexpected 'end of ")


def test_a_target_without_a_tokenizer_or_a_template_cannot_chat(monkeypatch, capsys, tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    capsys.readouterr()
    status, out, err = talk(monkeypatch, capsys, "Hello.", options=("--target", str(tmp_path)))
    assert (status, out) == (2, "")
    assert err == ("error: there is no tokenizer beside the target, and a chat needs one; name it with --tokenizer\n")
    status, _, err = talk(
        monkeypatch, capsys, "Hello.", options=("--target", str(EMBEDDED_TARGET), "--tokenizer", str(tmp_path))
    )
    assert (status, "there is no tokenizer in" in err) == (2, True)


def test_a_target_that_is_not_there_is_told_as_a_model(monkeypatch, capsys, tmp_path):
    missing = str(tmp_path / "missing")
    status, _, err = talk(monkeypatch, capsys, "Hello.", options=("--target", missing))
    assert (status, f"there is no directory {missing}; give a model's directory" in err) == (2, True), err


def interrupted(*lines: str | type[BaseException]):
    """What `input` does: it gives lines, and is interrupted where an exception stands."""
    said = iter(lines)

    def given() -> str:
        line = next(said, "/quit")
        if not isinstance(line, str):
            raise line
        return line

    return given


def test_an_interrupt_at_the_prompt_drops_the_line_and_a_second_one_leaves(monkeypatch, capsys):
    stop = KeyboardInterrupt
    monkeypatch.setattr("builtins.input", interrupted(stop, "Hello.", stop, "Hello.", stop, stop, "Never said."))
    status, _, err = run(monkeypatch, capsys, "chat", *SHORT)
    assert (status, err.count("[4 tokens,")) == (0, 2), err
    assert err.count("an interrupt again, the end of input or /quit leaves") == 3
