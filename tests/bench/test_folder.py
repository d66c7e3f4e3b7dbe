"""Folders of measurements: rows as they come, runs that go on where they were cut off, nothing half-written."""

import gzip
import json
import re
from dataclasses import dataclass

import pytest

from outrider import InputError
from outrider.bench.evidence import IntervalEstimate
from outrider.bench.folder import folder, read_rows
from outrider.bench.plot import Curve, Dots, Panel, draw
from outrider.bench.report import Findings, Table
from outrider.bench.turns import turns


@dataclass(frozen=True)
class Thing:
    """A way or a job."""

    name: str


WAYS, JOBS = [Thing("a"), Thing("b")], [Thing("x"), Thing("y")]


def measure(out, arguments, rounds=1, fail_after=None):
    """Rows of all turns; cut off after some."""
    done = []

    def run(turn):
        if fail_after is not None and len(done) == fail_after:
            raise KeyboardInterrupt
        done.append(turn.name)
        return {"value": turn.way.name + turn.job.name}

    with folder(out, "test", arguments) as place:
        rows = place.take("measured", turns(WAYS, JOBS, rounds=rounds), run)
        place.finish(Findings(tables=[Table(head=("value",), lines=[[row["value"]] for row in rows])]))
    return rows, done


def test_every_way_does_every_job_in_every_round_in_a_shuffled_order():
    names = [turn.name for turn in turns(WAYS, JOBS, rounds=3)]
    assert len(set(names)) == len(names) == 12
    assert names == [turn.name for turn in turns(WAYS, JOBS, rounds=3)]
    assert names != [turn.name for turn in turns(WAYS, JOBS, rounds=3, seed=1)]
    # A job is done by all ways before the next one begins.
    jobs = [turn.job.name for turn in turns(WAYS, JOBS, rounds=3)]
    assert jobs[0::2] == jobs[1::2]


def test_two_ways_with_one_name_are_a_mistake():
    with pytest.raises(ValueError, match="two ways have one name"):
        list(turns([Thing("a"), Thing("a")], JOBS))


def test_a_run_that_was_cut_off_goes_on_where_it_stopped(tmp_path):
    whole, _ = measure(tmp_path / "whole", {"n": 1})
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path / "cut", {"n": 1}, fail_after=3)
    # The last line was being written.
    rows = tmp_path / "cut" / "rows.jsonl"
    rows.write_text(rows.read_text()[:-5])
    rest, done = measure(tmp_path / "cut", {"n": 1})
    assert len(done) == 2
    assert rest == whole
    assert read_rows(rows) == read_rows(tmp_path / "whole" / "rows.jsonl")
    assert len(json.loads((tmp_path / "cut" / "circumstances.json").read_text())["resumed"]) == 1


def test_rows_are_read_alike_plain_and_packed_and_a_run_goes_on_from_packed_ones(tmp_path):
    place = tmp_path / "rows.jsonl"
    whole, _ = measure(tmp_path, {"n": 1})
    plain = read_rows(place)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(place.read_bytes(), mtime=0))
    place.unlink()
    assert read_rows(place) == plain
    # Those of the first round are not measured again.
    more, done = measure(tmp_path, {"n": 1}, rounds=2)
    assert (len(done), more[: len(whole)]) == (len(whole), whole)
    assert read_rows(place)[: len(plain)] == plain


def test_packed_rows_of_an_unknown_run_are_refused(tmp_path):
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b"{}\n", mtime=0))
    with pytest.raises(InputError, match="rows of an unknown run"):
        measure(tmp_path, {"n": 1})


def test_more_rounds_go_on_and_the_same_again_measures_nothing(tmp_path):
    measure(tmp_path, {"n": 1, "rounds": 1})
    _, done = measure(tmp_path, {"n": 1, "rounds": 2}, rounds=2)
    assert len(done) == 4
    before = (tmp_path / "circumstances.json").read_text()
    rows, done = measure(tmp_path, {"n": 1, "rounds": 2}, rounds=2)
    assert (len(rows), done) == (8, [])
    assert len(json.loads(before)["resumed"]) == len(
        json.loads((tmp_path / "circumstances.json").read_text())["resumed"]
    )


def test_rows_of_other_arguments_are_not_mixed(tmp_path):
    measure(tmp_path, {"n": 1})
    with pytest.raises(InputError, match="rows of a run with another n; give another with --out"):
        measure(tmp_path, {"n": 2})
    (tmp_path / "circumstances.json").unlink()
    with pytest.raises(InputError, match="unknown run"):
        measure(tmp_path, {"n": 1})


def test_without_a_folder_nothing_is_written_and_rows_are_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows, _ = measure(None, {"n": 1})
    assert len(rows) == 4
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_the_folder_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="there is a file of this name"):
        measure(tmp_path / "file", {})


@pytest.mark.parametrize("high", [1.3, 64.0])
def test_the_axis_of_ratios_has_several_numbers_whether_they_are_near_or_far(high):
    ratio = IntervalEstimate(value=1.1, low=0.9, high=high)
    svg = draw([Dots(title="b", x="x", names=["n"], groups={"g": [ratio]})])
    assert len(set(re.findall(r"<!-- ([0-9.]+) -->|>([0-9.]+)</text>", svg))) >= 3


def test_the_report_stands_alone_and_shows_what_was_found(tmp_path):
    estimate = IntervalEstimate(value=1.0, low=0.5, high=2.0)
    findings = Findings(
        tables=[Table(title="A <table>", text="Before it.", head=("h",), lines=[["<cell>"]]), Table(text="Only text.")],
        panels=[
            Panel(title="p", x="x", y="y", curves=[Curve(label="c", x=[1, 2], y=[estimate] * 2)]),
            Dots(title="b", x="x", names=["n", "m"], groups={"g": [estimate, None]}),
        ],
        text="What was done.",
        summary={"figure": 1},
    )
    with folder(tmp_path, "test", {"argument": 3}) as place:
        place.add({"row": 1})
        assert place.finish(findings) == []
    page = (tmp_path / "report.html").read_text()
    assert "&lt;cell&gt;" in page
    assert "A &lt;table&gt;" in page
    assert page.count("<svg") == page.count("<figure>") == 2
    assert "src=" not in page
    assert 'href="rows.jsonl"' in page
    assert json.loads((tmp_path / "summary.json").read_text()) == {"figure": 1}
    assert "| <cell> |" in (tmp_path / "table.md").read_text()
    assert "What was done." in (tmp_path / "table.md").read_text()
    assert not (tmp_path / "claims.json").exists()
    assert not list(tmp_path.glob("*.new"))
