"""Help: every option stands there whole, below a heading; `-h` asks for it."""

import re

import pytest
import typer

from outrider.cli.commands import app
from outrider.cli.help import FIRST
from tests.cli.runs import done, run


def commands(group, *before: str) -> list[tuple[str, ...]]:
    """The words of every command."""
    found = [before]
    for name, each in getattr(group, "commands", {}).items():
        found += commands(each, *before, name)
    return found


ALL = typer.main.get_command(app)


@pytest.mark.parametrize("words", commands(ALL), ids=" ".join)
def test_no_name_is_cut_off_in_help(monkeypatch, capsys, words):
    monkeypatch.setenv("COLUMNS", "80")
    out = done(monkeypatch, capsys, *words, "-h")
    assert max(map(len, out.splitlines())) <= 80
    assert not re.search(r"…|\w\.\.\.$", out, re.MULTILINE), out
    command = ALL
    for word in words:
        command = command.commands[word]
    listed = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", out))
    # An argument is shown in capitals.
    named = {param.name for param in command.params if param.param_type_name == "argument"}
    assert all(f"{name.upper()}" in out for name in named)
    assert {name for param in command.params for name in (*param.opts, *param.secondary_opts)} <= listed | named
    assert run(monkeypatch, capsys, *words, "--help")[1] == out


def test_the_options_that_people_use_first_come_first(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    out = run(monkeypatch, capsys, "generate", "-h")[1]
    names = re.findall(r"^  (--[a-z-]+)", out, re.MULTILINE)
    wanted = [f"--{name.removeprefix('as_').replace('_', '-')}" for name in FIRST if name not in ("data", "out")]
    assert names[:10] == wanted
    assert len(out.splitlines()) < 194


def test_links_of_methods_stay_whole(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    out = run(monkeypatch, capsys, "methods")[1]
    links = re.findall(r"https://\S+", run(monkeypatch, capsys, "methods", "--json")[1].replace('"', " "))
    assert len(links) > 30
    assert [link for link in links if link.rstrip(",;") not in out] == []
