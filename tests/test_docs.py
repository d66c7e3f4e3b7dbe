"""The documentation's examples run, and its generated page is up to date."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from outrider import catalog
from outrider.cli.app import main
from outrider.cli.methods import markdown

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def fenced(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [p for p in PAGES if fenced(p, "python")], ids=lambda p: p.name)
def test_python_examples_run(page, capsys, monkeypatch):
    monkeypatch.setattr(catalog, "ROWS", catalog.ROWS)  # A page may add a method.
    space: dict[str, object] = {}
    for i, block in enumerate(fenced(page, "python")):
        exec(compile(block, f"{page.name}, example {i}", "exec"), space)
    assert "False" not in capsys.readouterr().out


COMMANDS = [
    line[2:] for p in PAGES for block in fenced(p, "console") for line in block.splitlines() if line[:2] == "$ "
]


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("outrider ")])
def test_commands_run(command, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", shlex.split(command, comments=True))
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code in (None, 0), capsys.readouterr().err


def test_the_page_of_methods_is_what_the_catalog_says():
    assert (ROOT / "docs" / "methods.md").read_text(encoding="utf-8") == markdown()


def test_the_readme_names_every_file_of_the_package():
    tree = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in sorted((ROOT / "outrider").iterdir()):
        if path.suffix == ".py" or (path.is_dir() and path.name != "__pycache__"):
            assert path.name in tree, path.name
