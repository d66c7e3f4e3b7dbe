"""Throughput: every way runs every request, and ratios are of the same round."""

import json

import pytest

from recipes import throughput


def test_every_way_is_run_with_few_and_many_slots(tmp_path):
    entries = throughput.run(tmp_path, num_prompts=3, max_new_tokens=4, rounds=1, threads=1)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    ways = {(slots, throughput.name_of(n)) for slots in throughput.SLOTS for n in throughput.LENGTHS}
    assert {(row["slots"], row["way"]) for row in rows} == ways
    assert all(row["tokens"] == 3 * 4 for row in rows)
    assert len(entries) == len(ways)


def test_ratios_are_to_plain_decoding_of_the_same_round():
    rows = [
        {"slots": 8, "way": way, "round": round_, "tokens": 10, "seconds": seconds}
        for way, times in {"plain": (1.0, 4.0), "chain of 2": (0.5, 1.0)}.items()
        for round_, seconds in enumerate(times)
    ]
    plain, chain = throughput.summarise(rows)
    assert plain["over_plain"] == 1
    assert chain["over_plain"] == pytest.approx(3)
    assert chain["spread"] == [2, 4]
