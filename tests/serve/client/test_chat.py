"""A conversation with a server."""

import re

from outrider.serve.client.remote import Remote
from tests.cli.runs import run


def talk(monkeypatch, capsys, url: str, *lines: str, options: tuple[str, ...] = ()) -> tuple[int, str, str]:
    """Exit status, answers and remarks of a conversation."""
    said = iter(lines)
    monkeypatch.setattr("builtins.input", lambda: next(said, "/quit"))
    return run(monkeypatch, capsys, "chat", "--url", url, "--max-new-tokens", "8", *options)


def test_a_server_answers_and_tells_its_numbers(monkeypatch, capsys, url):
    status, out, err = talk(monkeypatch, capsys, url, "Tell me about a dog.", options=("--temperature", "0"))
    assert (status, bool(out.strip())) == (0, True), err
    assert re.search(r"\[\d+ tokens, \d+ steps, block efficiency \d\.\d\d\]", err), err
    body = {"messages": [{"role": "user", "content": "Tell me about a dog."}], "max_tokens": 8, "temperature": 0}
    answer = Remote(url=url).post("/v1/chat/completions", body)
    assert answer["choices"][0]["message"]["content"] == out.removesuffix("\n")


def test_settings_and_reset_work_as_with_an_engine(monkeypatch, capsys, url):
    lines = ["/set max_new_tokens 2", "Hello.", "/reset", "/set temprature 1", "/set temperature -1"]
    status, _, err = talk(monkeypatch, capsys, url, *lines)
    assert status == 0
    assert "[2 tokens," in err
    assert "unknown setting 'temprature'" in err
    assert "temperature must be >= 0" in err


def test_what_the_server_refuses_ends_nothing(monkeypatch, capsys, url):
    status, _, err = talk(monkeypatch, capsys, url, "Hello.", "a " * 5000, "/reset", "Hello.")
    assert (status, "answered 400" in err) == (0, True), err
    assert err.count(" steps, ") == 2


def test_a_key_needs_a_server(monkeypatch, capsys):
    status, _, err = run(monkeypatch, capsys, "chat", "--api-key", "x")
    assert (status, "--api-key is about a server; give --url too" in err) == (2, True), err
