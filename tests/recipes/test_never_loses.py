"""The defaults beside plain decoding and fixed lengths: fresh processes, equal tokens, and figures of medians."""

import json
import math
import os
from pathlib import Path

import pytest

from outrider.core.types import InputError
from outrider.host import remembered
from recipes import never_loses
from recipes.never_loses import CONTROL, records_in


def test_every_way_emits_the_same_tokens_and_a_run_goes_on_where_it_was_cut_off(tmp_path):
    asked = {"requests": "2", "lengths": "3", "temperatures": "0", "states": "empty", "max_new_tokens": 8, "rounds": 1}
    entries = never_loses.main(tmp_path, **asked, threads=1)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == len(entries) == 1
    for row in rows:
        assert {way: made["tokens"] for way, made in row["ways"].items()} == dict.fromkeys(
            ("plain", "plain, again", "fixed:3", "default"), 6 * 2 * 8
        )
        assert row["ways"]["plain"]["drafted"] == 0 < row["ways"]["fixed:3"]["drafted"]
    assert {"table.md", "summary.json", "circumstances.json"} <= {f.name for f in tmp_path.iterdir()}
    # Nothing is measured again.
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row | {"loading": -1.0}) + "\n" for row in rows))
    assert never_loses.main(tmp_path, **asked, threads=1) == entries


def test_costs_are_kept_apart_and_everything_else_where_it_was(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "usual"))
    with records_in(str(tmp_path / "own")):
        for kind in (*never_loses.LEARNT, "forward"):
            remembered.write(kind, {"a": 1}, {"b": 2})
            assert remembered.read(kind, {"a": 1}) == {"b": 2}
    assert os.environ["OUTRIDER_CACHE"] == str(tmp_path / "usual")
    assert remembered.read("costs", {"a": 1}) is None
    assert remembered.read("forward", {"a": 1}) == {"b": 2}
    assert len(list((tmp_path / "own").iterdir())) == 2


def test_figures_are_medians_of_quotients_over_the_best_way():
    def row(round_: int, **seconds: float) -> dict[str, object]:
        ways = {
            way.replace("_", ":"): {"seconds": s, "turns": [s / 2] * 2, "drafted": 5, "steps": 10, "by_costs": s}
            for way, s in {**seconds, CONTROL: seconds["plain"]}.items()
        }
        return {"round": round_, "temperature": 1.0, "seeded": True, "requests": 8, "state": "kept", "ways": ways}

    rows = [row(i, plain=p, fixed_2=f, default=d) for i, (p, f, d) in enumerate([(1, 2, 1), (2, 1.8, 2), (4, 1, 9)])]
    [found] = never_loses.summarise(rows)
    assert (found["best"], found["over_plain"], found["over_best"]) == ("fixed:2", 1.0, pytest.approx(0.9))
    assert found["spread"] == pytest.approx([1 / 9, 2.0])
    # 1 + 2 + 4 of plain decoding are most, 2 + 1.8 + 1 of `fixed:2` are least, and the default has 12.
    assert found["over_best_by_costs"] == pytest.approx(4.8 / 12)
    assert found["loses"]
    assert "at least 0.900 (goal 0.93)" in never_loses.findings([found]).text


def test_a_way_that_is_best_by_luck_in_some_turns_is_not_compared_there():
    turns = {"plain": [1.0, 1.0], CONTROL: [1.0, 1.0], "default": [1.0, 1.0], "fixed:1": [0.5, 1.25]}
    row = {"ways": {way: {"turns": each} for way, each in turns.items()}}
    # Chosen in the first turn, `fixed:1` loses in the second; there plain decoding is chosen, and is as fast.
    assert never_loses.over_best_elsewhere([row]) == pytest.approx(math.sqrt(1.25 * 1.0))


@pytest.mark.parametrize(("options", "name"), [({"states": "warm"}, "--states"), ({"lengths": "x"}, "--lengths")])
def test_wrong_options_are_told(options, name):
    with pytest.raises(InputError, match=name):
        never_loses.main(**options)
