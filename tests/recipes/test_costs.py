"""What processes cost: parts within parts count once, comparisons are of one round, and every way gives its figures."""

import itertools

import pytest

from outrider.core.types import InputError
from recipes import cost_programs, costs, quartiles
from recipes.cost_programs import FIRST, MODELS, OWN, PARTS, PREPARED, REST, START, Watch, reader
from recipes.costs import BARE, OURS, Part, Plan, findings, summarise
from recipes.label import Label


def test_a_part_within_another_counts_for_itself_alone():
    seconds = itertools.count(10)
    watch = Watch(7.0, clocks=lambda: (float(now := next(seconds)), now / 10))
    with watch.part(OWN):
        with watch.part(MODELS):
            pass
        with watch.part(MODELS):
            pass
    with watch.part(FIRST):
        pass
    spent = {START: 3.0, OWN: 3.0, MODELS: 2.0, FIRST: 1.0, REST: 2.0}
    assert {part: wall for part, wall in watch.wall.items() if wall} == spent
    assert watch.cpu[START] == pytest.approx(1.0)
    assert watch.cpu[OWN] == pytest.approx(0.3)
    assert list(watch.figures) == [f"{clock}: {part}" for clock in ("wall", "cpu") for part in PARTS]


def test_a_wrapped_function_counts_as_its_part(monkeypatch):
    monkeypatch.setattr(quartiles, "extremes", quartiles.extremes)
    seconds = itertools.count(0)
    watch = Watch(0.0, clocks=lambda: (float(next(seconds)), 0.0))
    watch.wrap("recipes.quartiles", "extremes", PREPARED)
    assert quartiles.extremes([1.0, 2.0, 4.0]).value == 2.0
    assert quartiles.extremes.__doc__ == "Median, lowest and highest."
    assert watch.wall[PREPARED] == 1.0


def test_figures_are_compared_with_the_bare_ones_of_the_same_round():
    part = Part(name="start", title="Start", run=lambda way, job: {}, goals={"wall": 1.05})
    rows = [
        {"phase": "start", "job": "once", "way": way, "round": k, "figures": {"wall": seconds, "zero": 0.0}}
        for way, own in ((BARE, (1.0, 2.0, 4.0)), (OURS, (1.0, 3.0, 4.4)))
        for k, seconds in enumerate(own)
    ]
    entries = {entry["figure"]: entry for entry in summarise(rows, part)}
    ratio = entries["wall"]["ratio"]
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1.1, 1.0, 1.5))
    assert entries["wall"]["more"].value == pytest.approx(0.4)
    assert entries["wall"]["values"][OURS].value == 3.0
    assert "ratio" not in entries["zero"]
    told = findings(list(entries.values()), [part], rounds=3)
    assert "missed by wall of start, once: 1.10" in told.text
    assert told.tables[0].lines[0] == ["once", "wall", "2 [1, 4]", "3 [1, 4.4]", "0.4 [0, 1]", "1.1 [1, 1.5]", 1.05]


def test_both_ways_to_read_a_prompt_say_the_same_token_each_time():
    ours, theirs = (reader(way, 48, "float32") for way in (OURS, BARE))
    said = [read(list(range(48))) for read in (ours, theirs, ours)]
    assert said[0] == said[1] == said[2]
    assert len(said[0]) == 1


def test_a_prompt_has_seconds_and_memory_of_both_ways(tmp_path):
    given = {"parts": "prompts", "lengths": "64", "dtypes": "float32", "turns": 1, "rounds": 1, "threads": 1}
    entries = costs.main(out=tmp_path, **given)
    found = {entry["figure"]: entry["values"] for entry in entries}
    assert list(found) == ["seconds", "megabytes"]
    assert all(set(values) == {BARE, OURS} for values in found.values())
    assert min(found["seconds"][way].value for way in (BARE, OURS)) > 0
    assert "| 64 tokens, float32 | megabytes |" in (tmp_path / "table.md").read_text()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dtypes": "float8"}, "--dtypes must be of float32, bfloat16, with commas"),
        ({"parts": "end"}, "--parts must be of start, parts, prompts, memory, with commas"),
        ({"requests": 1}, "warmup must be <= the number of requests, 1, got 20"),
    ],
)
def test_what_is_not_known_is_refused(given, words):
    with pytest.raises(InputError, match=words):
        Plan(**given)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["start", "parts"])
@pytest.mark.parametrize("way", [BARE, OURS])
def test_every_way_reaches_its_first_token(name, way):
    [part] = Plan(parts=name, threads=1).chosen
    row = part.run(way, None)
    if name == "start":
        assert min(row["cpu"], row["wall"]) > 0
        return
    lacking = {f"cpu: {part}" for part in (OWN, PREPARED)} if way == BARE else set()
    assert {part for part in row if part.startswith("cpu") and row[part] == 0} - {f"cpu: {REST}"} == lacking


@pytest.mark.slow
def test_memory_has_figures_of_every_way():
    [part] = Plan(parts="memory", requests=4, warmup=2, threads=1).chosen
    rows = {way.name: part.run(way.name, None) for way in part.ways}
    assert rows[OURS].keys() == rows[BARE].keys() == {"imported", "loaded", "worked"}
    assert all(row > 0 for row in rows[BARE].values())
    assert part.ways[-1] == Label("many requests", "many requests")
    assert set(rows["many requests"]) == {"after the warm-up", "after the last request", "growth"}


def test_programs_are_found_by_their_names():
    assert set(cost_programs.PROGRAMS) >= {f"{way}_{what}" for way in (BARE, OURS) for what in ("memory", "start")}
