"""A new head is one file and one row: those of docs/guide/extend.md pass the tests of all heads."""

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import typer

from outrider import catalog
from outrider.core.row import Row
from tests.cli.runs import ROOT, run
from tests.drafters import test_toy_heads
from tests.heads import test_catalog_heads
from tests.proof import test_head_law

ROWS = {"gated": "sampled", "staged": "marginal"}
"""The new heads, one that continues features and one that guesses blocks, and what their guesses are."""
CLAIMS: dict[str, Callable[..., None]] = {
    **{
        name: each
        for name, each in vars(test_catalog_heads).items()
        if name.startswith("test_") and "kind" in inspect.signature(each).parameters
    },
    "greedy": partial(
        test_toy_heads.test_greedy_output_of_ragged_batches_is_that_of_plain_decoding,
        tree="dynamic:width=3,num_nodes=8",
        verifier="match",
    ),
    "law": partial(test_head_law.test_whole_runs_keep_the_law, tree="gumbel:branching=2x1", rule="traversal"),
    "law of a batch": test_head_law.test_two_requests_of_a_batch_keep_the_law_together,
    "traits": test_toy_heads.test_a_head_states_what_it_reads_and_keeps,
}


@pytest.fixture(params=ROWS)
def new_head(request, monkeypatch, tmp_path_factory) -> Iterator[str]:
    """The name of a head that the catalog has since now."""
    name = request.param
    page = (ROOT / "docs" / "guide" / "extend.md").read_text(encoding="utf-8")
    [file] = re.findall(rf"^```python file={name}\.py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    folder = tmp_path_factory.mktemp("new")
    (folder / f"{name}.py").write_text(file, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    row = Row(family="drafter", name=name, home=f"{name}:SPEC", summary="a new head", source="-")
    monkeypatch.setattr(catalog, "ROWS", (*catalog.ROWS, row))
    # Commands are made once, from the catalog of that time.
    typer.main.get_command.cache_clear()
    yield name
    typer.main.get_command.cache_clear()
    sys.modules.pop(name, None)


@pytest.mark.parametrize("claim", CLAIMS)
def test_what_holds_for_all_heads_holds_for_a_new_one(claim, new_head, request):
    if claim not in vars(test_catalog_heads):
        request.getfixturevalue("float64_stays_float64")
    test = CLAIMS[claim]
    wanted = set(inspect.signature(test).parameters) - {"kind", *getattr(test, "keywords", ())}
    test(kind=new_head, **{name: request.getfixturevalue(name) for name in wanted})


def test_a_new_head_has_a_command_and_a_line_of_the_docs(new_head, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    commands = run(monkeypatch, capsys, "train", "--help")[1]
    assert re.search(rf"^  {new_head} +Train a {new_head} head", commands, re.MULTILINE), commands
    page = run(monkeypatch, capsys, "methods", "--markdown")[1]
    assert f"| `{new_head}` | a new head |" in page
    assert f"| `{new_head}` | {ROWS[new_head]} | no | yes | yes | {new_head} |" in page
