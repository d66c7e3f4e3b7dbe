"""The documentation's examples run, and its generated page is up to date."""

import ast
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider import catalog
from outrider.cli.app import main
from outrider.cli.methods import markdown
from outrider.core.inputs import REPOSITORY

ROOT = Path(__file__).parent.parent
DECISIONS = sorted((ROOT / "docs" / "laboratory" / "decisions").glob("*.md"))
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page not in DECISIONS)]


def fenced(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def files(monkeypatch, tmp_path) -> Iterator[None]:
    """The files that pages show whole, where Python imports them from."""
    shown = {
        name: body
        for page in PAGES
        for name, body in re.findall(
            r"^```python file=(\w+)\.py\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        )
    }
    for name, body in shown.items():
        (tmp_path / f"{name}.py").write_text(body, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(catalog, "ROWS", catalog.ROWS)  # A page may add a method.
    yield
    for name in shown:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("page", [p for p in PAGES if fenced(p, "python")], ids=lambda p: f"{p.parent.name}/{p.name}")
@pytest.mark.usefixtures("files")
def test_python_examples_run(page, capsys):
    space: dict[str, object] = {}
    for i, block in enumerate(fenced(page, "python")):
        exec(compile(block, f"{page.name}, example {i}", "exec"), space)
    assert "False" not in capsys.readouterr().out


COMMANDS = [
    line[2:] for p in PAGES for block in fenced(p, "console") for line in block.splitlines() if line[:2] == "$ "
]


def test_commands_run(capsys, monkeypatch, tmp_path):
    """One after the other in one folder: some read what others wrote."""
    monkeypatch.chdir(tmp_path)
    for command in (c for c in COMMANDS if c.startswith("outrider ")):
        monkeypatch.setattr(sys, "argv", shlex.split(command, comments=True))
        with open(os.devnull) as nothing:
            monkeypatch.setattr(sys, "stdin", nothing)
            with pytest.raises(SystemExit) as ended:
                main()
        assert ended.value.code in (None, 0), (command, capsys.readouterr().err)


def test_what_examples_write_does_not_lie_at_the_root():
    written = {
        name
        for page in PAGES
        for block in fenced(page, "python")
        for name in re.findall(r"Path\(\"([^\"/]+)\"\)\.write|\.save\(\"([^\"/]+)\"\)", block)
        for name in name
        if name
    }
    assert "texts.jsonl" in written
    assert [name for name in written if (ROOT / name).exists()] == []


def test_the_install_lines_are_the_same_everywhere():
    sources = [*PAGES, *(ROOT / "outrider").rglob("*.py")]
    extras = {
        line
        for path in sources
        for line in re.findall(r"pip install [^`\n]*outrider\[[^`\n]*", path.read_text("utf-8"))
    }
    [message] = [line for line in extras if "{extra}" in line]
    shape = message.replace("{extra}", "E").replace("{REPOSITORY}", REPOSITORY)
    assert {re.sub(r"outrider\[\w+\]", "outrider[E]", line) for line in extras - {message}} == {shape}


def test_links_of_the_readme_are_absolute_and_lead_to_files():
    links = re.findall(
        r"^\[\w+\]: (\S+)$|\]\(([^)]*)\)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    links = [one or other for one, other in links]
    own = "https://github.com/outrider-decoding/outrider/blob/main/"
    assert [link for link in links if not link.startswith("https://")] == []
    assert [link for link in links if link.startswith(own) and not (ROOT / link.removeprefix(own)).exists()] == []
    assert any(link.startswith(own) for link in links)


@pytest.mark.parametrize("page", [*PAGES[1:], *DECISIONS], ids=lambda p: f"{p.parent.name}/{p.name}")
def test_links_between_pages_lead_to_files(page):
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_the_index_names_every_page():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = [p.relative_to(ROOT / "docs").as_posix() for p in (*PAGES[1:], *DECISIONS) if p.name != "README.md"]
    assert [page for page in pages if f"]({page}" not in index] == []


MEASURED = sorted(path for path in (ROOT / "measurements").rglob("*") if path.is_file())


def test_pages_quote_every_folder_of_measurements_and_show_every_plot():
    pages = "".join(page.read_text(encoding="utf-8") for page in [*PAGES, *DECISIONS])
    pages += (ROOT / "recipes" / "zoo.py").read_text(encoding="utf-8")
    folders = {path.relative_to(ROOT).parts[1] for path in MEASURED}
    assert [name for name in sorted(folders) if f"measurements/{name}" not in pages] == []
    plots = [path.relative_to(ROOT).as_posix() for path in MEASURED if path.suffix == ".svg"]
    assert [plot for plot in plots if plot not in pages] == []


def test_rows_of_measurements_are_packed_without_a_time_or_a_name():
    assert [path for path in MEASURED if path.suffix == ".jsonl"] == []
    packed = [path for path in MEASURED if path.suffix == ".gz"]
    # The flags and the time of RFC 1952.
    assert packed
    assert [path.name for path in packed if path.read_bytes()[3:8] != bytes(5)] == []


def test_measurements_name_models_and_texts_without_the_folders_of_one_machine():
    read = [path for path in MEASURED if path.suffix in (".json", ".md")]
    assert read
    absolute = re.compile(r"""["'=\s`]/(?:[\w.-]+/)+[\w.-]+""")
    found = {path.relative_to(ROOT).as_posix(): absolute.findall(path.read_text(encoding="utf-8")) for path in read}
    assert {name: paths for name, paths in found.items() if paths} == {}


WIDTH = 130


def test_no_line_of_a_page_is_longer_than_130_characters():
    """Rows of tables are exempt, as Markdown cannot break them."""
    pages = [*PAGES, *DECISIONS, *ROOT.glob("*.md")]
    long = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in pages
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > WIDTH and not line.startswith("|")
    ]
    assert long == []


def test_an_extra_names_only_what_is_imported():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    sources = "\n".join(
        path.read_text() for room in ("outrider", "recipes", "tests") for path in (ROOT / room).rglob("*.py")
    )
    for extra in extras.keys() - {"dev"}:
        for name in (re.split(r"[<>=\[]", needed)[0] for needed in extras[extra]):
            # torch has the writer of tensorboard. OpenTelemetry's packages share a module.
            module = name.replace("-", r"\.")
            assert re.search(rf"^ *(import|from) (torch\.utils\.)?{module}\b", sources, re.MULTILINE), (extra, name)


def test_what_the_package_imports_is_named_by_it_or_an_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [name for extra in project["optional-dependencies"].values() for name in extra]
    named = {re.split(r"[<>=\[-]", name)[0] for name in [*project["dependencies"], *extras]}
    # What runs in the environments of other engines: their drivers, and the smoke tests of exports.
    package = ROOT / "outrider"
    elsewhere = {package / "bench" / "engines", package / "handoff" / "checks", package / "serve" / "vllm"}
    paths = [path for path in package.rglob("*.py") if path.parent not in elsewhere]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    statements = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {ast.unparse(node).split()[1].partition(".")[0] for node in statements}
    assert imported - named - sys.stdlib_module_names == {"outrider"}


def test_the_page_of_methods_is_what_the_catalog_says():
    assert (ROOT / "docs" / "guide" / "methods.md").read_text(encoding="utf-8") == markdown()


def test_the_page_of_rooms_names_every_file_of_the_package():
    tree = (ROOT / "docs" / "guide" / "data-flow.md").read_text(encoding="utf-8")
    for path in sorted((ROOT / "outrider").iterdir()):
        if path.suffix == ".py" or (path.is_dir() and path.name != "__pycache__"):
            assert f"`{path.name}{'/' if path.is_dir() else ''}`" in tree, path.name
