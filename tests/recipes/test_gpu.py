"""The GPU recipe: refused where there is no GPU; its parts run in processes of their own, and none stops the others."""

import json
import sys
from collections.abc import Iterator
from functools import partial
from itertools import islice

import pytest
import torch

from outrider import InputError
from recipes import gpu
from recipes.gpu import REHEARSAL

PRINTS = "import json; print('loading'); print(json.dumps({'name': 'one', 'holds': True}), flush=True)"
PARTS = {part.name: part.run for part in gpu.ALL}
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_recipe_says_so_and_writes_nothing(tmp_path):
    with pytest.raises(InputError, match="needs a CUDA device"):
        gpu.run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_unknown_part_is_named(tmp_path):
    with pytest.raises(InputError, match="unknown part 'law'; available: identities, laws, forwards, profile"):
        gpu.run(tmp_path / "run", rehearse=True, parts=["law"])


def test_parts_take_ten_minutes_at_most():
    assert sum(part.limit for part in gpu.ALL) <= 600


@pytest.mark.parametrize(
    ("ends", "limit", "error"),
    [
        ("", 60.0, None),
        ("; raise ValueError('no memory')", 60.0, "ValueError: no memory"),
        ("; import time; time.sleep(60)", 1.0, "stopped after 1 seconds"),
        ("; import os; os._exit(3)", 60.0, "it ended with status 3"),
    ],
    ids=["well", "error", "late", "dead"],
)
def test_rows_of_a_process_are_kept_however_it_ends(ends, limit, error):
    first, *rest = gpu.rows_of([sys.executable, "-c", PRINTS + ends], limit)
    assert first == {"name": "one", "holds": True}
    assert rest == ([] if error is None else [{"name": "end", "error": error}])


def test_a_part_that_fails_leaves_its_rows_and_a_page(tmp_path, monkeypatch):
    limits = {part.name: part for part in gpu.ALL}

    def rows(command: list[str], limit: float) -> Iterator[gpu.Row]:
        assert command[:3] == [sys.executable, "-m", "recipes.gpu"]
        assert limit == limits[command[3]].limit
        yield {"name": "first", "holds": command[3] != "serving"}
        if command[3] == "laws":
            yield {"name": "end", "error": "out of memory"}
        else:
            yield {"name": "compiler", "skipped": 2, "recompiled": 1, "compiled": 4}

    monkeypatch.setattr(gpu, "rows_of", rows)
    summary = gpu.run(tmp_path, rehearse=True)
    assert summary["errors"] == {"laws": ["end: out of memory"]}
    assert list(summary["seconds"]) == list(limits)
    assert (summary["skipped_graphs"], summary["recompiled"], summary["differences"]) == (10, 5, 1)
    kept = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(kept) == 3 * len(limits)
    page = (tmp_path / "report.html").read_text()
    assert "out of memory" in page
    assert "parts with errors: 1" in page
    # What was done is not done again.
    monkeypatch.setattr(gpu, "rows_of", lambda *told: pytest.fail("taken again"))
    assert gpu.run(tmp_path, rehearse=True) == summary


def test_a_step_is_read_against_the_time_to_give_the_weights():
    row = {"phase": "profile", "turn": "profile | plain", "name": "plain", "target": 4.0, "floor": 0.5}
    found = gpu.summarise([{**row, "target": 9.0}, row, {"phase": "parts", "turn": "x", "seconds": 1.0, "errors": []}])
    assert found["parts"]["profile"]["plain"]["over_floor"] == 8.0


@pytest.mark.parametrize("part", ["forwards", "profile", "training", "serving"])
def test_in_a_rehearsal_a_part_runs_on_a_cpu_and_finds_nothing_wrong(part):
    rows = list(PARTS[part](REHEARSAL))
    assert len({row["name"] for row in rows}) == len(rows) > 1
    assert [row for row in rows if "error" in row] == []
    assert all(row.get("holds", True) and row.get("flat", True) for row in rows)
    assert all(row.get("tokens_per_second", 1.0) > 0 for row in rows)


def test_every_verifier_of_the_catalog_has_a_way():
    engine = gpu.loaded(REHEARSAL)
    names = dict(gpu.ways(engine))
    assert {name.partition(", ")[2] for name in names} == set(gpu.verifiers())
    some = [name for name in names if name.endswith("traversal")]
    prompts = gpu.prompts_of(engine, 1)
    for name in some:
        found = gpu.attempt(partial(gpu.same, names[name], prompts, REHEARSAL))
        assert (found["holds"], found["tokens"]) == (True, REHEARSAL.max_new_tokens)


def test_an_attempt_tells_what_is_refused_from_what_fails():
    def fails() -> gpu.Row:
        raise ValueError("first line\nsecond line")

    def refused() -> gpu.Row:
        raise InputError("not here")

    assert gpu.attempt(fails) == {"error": "ValueError: first line"}
    assert gpu.attempt(refused) == {"refused": "not here"}


@pytest.mark.parametrize(("part", "count"), [("laws", 1), ("identities", 2)])
def test_in_a_rehearsal_the_long_parts_begin_well(part, count):
    rows = list(islice(PARTS[part](REHEARSAL), count))
    assert rows[0]["name"].startswith("chain, token")
    assert [
        row for row in rows if "error" in row or not row.get("holds", True) or row.get("verdict") == "differs"
    ] == []


@pytest.mark.parametrize("part", [pytest.param(part.name, marks=ON_GPU) for part in gpu.ALL])
def test_on_a_gpu_a_part_finds_nothing_wrong(part, tmp_path):
    summary = gpu.run(tmp_path, parts=[part])
    assert summary["errors"] == {}
    names = ("differences", "wrong_laws", "skipped_graphs", "recompiled")
    assert {name: summary[name] for name in names} == dict.fromkeys(names, 0)
