"""Speculation beside plain decoding: every way does all the work, and figures are of the same rounds."""

import json

import pytest

from outrider.core.types import InputError
from recipes import never_loses


def test_every_way_emits_the_same_tokens_in_every_workload(tmp_path):
    entries = never_loses.run(tmp_path, requests="2", temperatures="0,1", max_new_tokens=8, rounds=1, threads=1)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    for requests in (2,):
        for temperature in (0, 1):
            for kind, tokens in (("fixed", 8 * requests), ("refilled", (8 + 4 + 6 + 2) * requests)):
                cell = {"requests": requests, "temperature": temperature, "kind": kind}
                own = [row for row in rows if cell.items() <= row.items()]
                assert {row["way"]: row["tokens"] for row in own} == dict.fromkeys(
                    ("plain", "default", "fixed:4"), tokens
                )
                assert all(row["drafted"] == 0 for row in own if row["way"] == "plain")
    assert len(entries) == 2 * 2 * 2
    assert any(row["drafted"] for row in rows if row["way"] == "default")
    assert {"table.md", "summary.json", "plot.svg", "circumstances.json"} <= {f.name for f in tmp_path.iterdir()}


def test_slots_are_refilled_as_soon_as_a_request_ends():
    work = never_loses.Workload.of(2, 0.0, True, [question(i) for i in range(3)], 8)
    assert [q.id for q in work.questions] == ["0", "1", "2", "0", "1", "2", "0", "1"]
    assert work.lengths == (8, 4, 6, 2, 8, 4, 6, 2)
    way = never_loses.Way.of("plain", never_loses.Setup(), 2)
    seen = []
    way.engine.watch = lambda cycle: seen.append(len(cycle.states))
    way.run(work)
    assert max(seen) == 2
    assert seen.count(1) < len(seen) / 2


def question(number: int) -> never_loses.Question:
    return never_loses.Question(id=str(number), category="a", tokens=(5 + number, 6))


def test_a_loss_is_a_quotient_of_medians_below_the_allowed_one():
    rows = [
        {
            "way": way,
            "round": round_,
            "requests": 8,
            "temperature": 1.0,
            "kind": "fixed",
            "tokens": 10,
            "drafted": 5,
            "steps": 10,
            "seconds": seconds,
        }
        for way, times in {"plain": (1.0, 2.0, 4.0), "slow": (1.0, 2.1, 5.0), "even": (1.1, 2.0, 3.0)}.items()
        for round_, seconds in enumerate(times)
    ]
    slow, even = never_loses.summarise(rows)
    assert (slow["way"], slow["over_plain"], slow["loses"]) == ("slow", pytest.approx(2 / 2.1), True)
    assert slow["spread"] == pytest.approx([0.8, 1.0])
    assert (even["way"], even["over_plain"], even["loses"]) == ("even", 1.0, False)


def test_plain_decoding_is_always_there_and_not_asked_for():
    with pytest.raises(InputError, match="--ways must be"):
        never_loses.run(None, ways="plain")
