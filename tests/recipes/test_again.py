"""A second run of a recipe with the same seed gives the same tokens, and so the same rows but for their clocks."""

import json
from pathlib import Path

import pytest

from recipes.__main__ import main
from tests.recipes.test_trained import TEXT

CLOCKS = {"seconds", "target_seconds", "drafter_seconds", "stepping", "profile", "forward", "draft_forward"}
"""Fields of a row that a clock measured."""
TRAINED = ("heads",)
"""Recipes that train drafters, and so need texts."""


def rows(folder: Path) -> list[dict[str, object]]:
    """The rows of a run without their clocks."""
    read = (json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines())
    return [{name: value for name, value in row.items() if name not in CLOCKS} for row in read]


def written(path: Path, records: list[dict[str, str]]) -> Path:
    """A file of records, a line each."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("block_gain", ()),
        ("optimal_rate", ()),
        ("pearl", ("--max-new-tokens", "10")),
        ("heads", ("--heads", "eagle", "--dtype", "float32")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_second_run_gives_the_same_rows(recipe, more, tmp_path, capsys):
    texts = written(tmp_path / "texts.jsonl", [{"domain": "story", "text": TEXT.format(i) * 3} for i in range(16)])
    asked = written(
        tmp_path / "asked.jsonl", [{"id": i, "category": "story", "prompt": f"One day {i} cats"} for i in "abcd"]
    )
    found = []
    for run in ("first", "second"):
        out = tmp_path / run
        given = ["--prompts", str(asked), "--out", str(out)]
        if recipe in TRAINED:
            given += ["--data", str(texts), "--work", str(tmp_path / f"{run} work")]
        with pytest.raises(SystemExit) as ended:
            main([recipe, "--quick", *given, *more])
        assert ended.value.code == 0, capsys.readouterr().err
        found.append(rows(out))
    assert found[0]
    assert found[0] == found[1]
