"""A new head is one file and one row: that of docs/guide/extend.md passes all heads' tests, and no test names it."""

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

NAME = "gated"
CLAIMS: dict[str, Callable[..., None]] = {
    **{name: each for name, each in vars(test_catalog_heads).items() if name.startswith("test_")},
    "greedy": partial(
        test_toy_heads.test_greedy_output_of_ragged_batches_is_that_of_plain_decoding,
        tree="dynamic:width=3,num_nodes=8",
        verifier="match",
    ),
    "law": partial(test_head_law.test_whole_runs_keep_the_law, tree="gumbel:branching=2x1", rule="traversal"),
    "law of a batch": test_head_law.test_two_requests_of_a_batch_keep_the_law_together,
    "traits": test_toy_heads.test_a_head_states_what_it_reads_and_keeps,
}


@pytest.fixture
def new_head(monkeypatch, tmp_path_factory) -> Iterator[str]:
    """The name of a head that the catalog has since now."""
    page = (ROOT / "docs" / "guide" / "extend.md").read_text(encoding="utf-8")
    [file] = re.findall(rf"^```python file={NAME}\.py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    folder = tmp_path_factory.mktemp("new")
    (folder / f"{NAME}.py").write_text(file, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    row = Row(family="drafter", name=NAME, home=f"{NAME}:SPEC", summary="a gate on the target's features", source="-")
    monkeypatch.setattr(catalog, "ROWS", (*catalog.ROWS, row))
    # Commands are made once, from the catalog of that time.
    typer.main.get_command.cache_clear()
    yield NAME
    typer.main.get_command.cache_clear()
    sys.modules.pop(NAME, None)


@pytest.mark.parametrize("claim", CLAIMS)
def test_what_holds_for_all_heads_holds_for_a_new_one(claim, new_head, request):
    if claim not in vars(test_catalog_heads):
        request.getfixturevalue("float64_stays_float64")
    test = CLAIMS[claim]
    told = set(inspect.signature(test).parameters) - {"kind", *getattr(test, "keywords", ())}
    test(kind=new_head, **{name: request.getfixturevalue(name) for name in told})


def test_a_new_head_has_a_command_and_a_line_of_the_docs(new_head, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    listed = run(monkeypatch, capsys, "train", "--help")[1]
    assert re.search(rf"^  {new_head} +Train a gated head", listed, re.MULTILINE), listed
    page = run(monkeypatch, capsys, "methods", "--markdown")[1]
    assert f"| `{new_head}` | a gate on the target's features |" in page
    assert f"| `{new_head}` | sampled | no | yes | yes | {new_head} |" in page
