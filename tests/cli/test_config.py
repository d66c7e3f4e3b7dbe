"""A setup in a file: the command line goes first, and what is wrong with a file is one sentence."""

import json
import tomllib

import pytest

from outrider.setup import Setup
from tests.cli.runs import done, run

SHORT = ["--prompt", "Once upon a time", "--max-new-tokens", "8", "--temperature", "0", "--json"]


def test_the_command_line_goes_before_the_file(monkeypatch, capsys, tmp_path):
    file, saved = tmp_path / "setup.toml", tmp_path / "saved.json"
    file.write_text('drafter = "ngram"\nlength = "fixed:2"\nallow_lossy = true\nmax_slots = 3\n')
    given = ["--config", str(file), "--length", "fixed:3", "--no-allow-lossy", "--save-config", str(saved)]
    out = done(monkeypatch, capsys, "generate", *SHORT, *given)
    assert json.loads(saved.read_text()) == {"drafter": "ngram", "length": "fixed:3", "max_slots": 3}
    again = run(monkeypatch, capsys, "generate", *SHORT, "--config", str(saved))[1]
    assert json.loads(again)["tokens"] == json.loads(out)["tokens"]


def test_a_saved_setup_is_toml_that_can_be_edited(monkeypatch, capsys, tmp_path):
    file = tmp_path / "setup.toml"
    tables = ["--device-map", '{"": "cpu"}', "--quantization-config", '{"bits": 4, "skip": ["head"]}']
    status, _, err = run(
        monkeypatch, capsys, "generate", *SHORT, *tables, "--target", "/no/such/place", "--save-config", str(file)
    )
    assert (status, "there is no directory /no/such/place" in err) == (2, True)
    written = tomllib.loads(file.read_text())
    assert written["device_map"] == {"": "cpu"}
    assert Setup.read(file).quantization_config == {"bits": 4, "skip": ["head"]}


@pytest.mark.parametrize("command", ["generate", "chat", "prove", "doctor"])
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('draftr = "ngram"', "unknown option 'draftr'; did you mean 'drafter'? Available: target, drafter, tree"),
        ("max_slots = 0", "max_slots must be >= 1, got 0"),
        ("drafter = ngram", "is not TOML: Invalid value (at line 1, column 11)"),
        (None, "there is no configuration file"),
    ],
    ids=["unknown", "bounds", "syntax", "missing"],
)
def test_a_wrong_file_is_one_sentence(monkeypatch, capsys, tmp_path, command, text, sentence):
    file = tmp_path / "setup.toml"
    if text is not None:
        file.write_text(text)
    status, out, err = run(monkeypatch, capsys, command, "--config", str(file))
    assert (status, out, sentence in err, err.count("\n")) == (2, "", True, 1), err


@pytest.mark.parametrize("place", ["", "file/setup.toml"])
def test_a_setup_that_cannot_be_saved_is_one_sentence(monkeypatch, capsys, tmp_path, place):
    (tmp_path / "file").write_text("")
    status, out, err = run(monkeypatch, capsys, "generate", "--prompt", "a", "--save-config", str(tmp_path / place))
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith(f"error: {tmp_path / place} cannot be written: "), err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--seed", str(2**64)], "seed must be <= 2**64 - 1, got 18446744073709551616"),
        (["--seed", "-1"], "seed must be >= 0, got -1"),
        (["--quantization-config", "int8"], "quantization_config must be a JSON object, got 'int8'"),
        (["--device-map", "{"], "device_map must be a JSON object, got '{'"),
        (["--device-map", "auto", "--device", "cpu"], "device and device_map both say where the model goes"),
        (["--logit-bias", "15"], "logit_bias must be a JSON object of token ids and numbers, such as"),
        (["--logit-bias", '{"a": 1}'], "logit_bias must be a JSON object of token ids and numbers, such as"),
        (["--logit-bias", '{"8192": 1}'], "logit_bias names token ids outside 0 .. 8191"),
        (["--logit-bias", '{"5": Infinity}'], "a logit_bias must be a number (-inf forbids a token), got inf"),
        (["--stop-token-ids", "-1"], "stop_token_ids holds token id -1, which is not in 0 .. 8191"),
        (["--logprobs", "-1", "--json"], "logprobs must be >= 0, got -1"),
        (["--logprobs", "1"], "log-probabilities are in JSON only; give --json or --output"),
        (["--tokenizer", "/no/such/place"], "there is no directory /no/such/place"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_options_get_one_sentence(monkeypatch, capsys, arguments, sentence):
    status, out, err = run(monkeypatch, capsys, "generate", "--prompt", "a", *arguments)
    assert (status, out, sentence in err, err.count("\n")) == (2, "", True, 1), err
