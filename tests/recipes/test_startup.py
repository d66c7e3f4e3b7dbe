"""Start-up: parts within parts count once, ratios are of the same round, and every way reaches its first token."""

import itertools

import pytest

from recipes import startup
from recipes.startup import CLOCKS, WAYS, Start, findings, summarise
from recipes.startup_parts import FIRST, MODELS, OWN, PARTS, PREPARED, REST, START, Watch


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


def test_a_wrapped_function_counts_as_its_part(monkeypatch):
    monkeypatch.setattr(startup, "spread", startup.spread)
    seconds = itertools.count(0)
    watch = Watch(0.0, clocks=lambda: (float(next(seconds)), 0.0))
    watch.wrap("recipes.startup", "spread", PREPARED)
    assert startup.spread([1.0, 2.0, 4.0]).value == 2.0
    assert startup.spread.__doc__ == "Median, lowest and highest."
    assert watch.wall[PREPARED] == 1.0


def test_ratios_are_of_the_same_round():
    rows = [
        {
            "way": way.name,
            "round": k,
            **{clock: dict.fromkeys(PARTS, k + 1.0) if way.in_parts else s for clock in CLOCKS},
        }
        for way in WAYS
        for k, s in enumerate((1.0, 2.0, 4.0) if way.package == "transformers" else (1.0, 3.0, 4.4))
    ]
    summary = summarise(rows)
    for clock in CLOCKS:
        found = summary[clock]
        assert (found["ratio"].value, found["ratio"].low, found["ratio"].high) == pytest.approx((1.1, 1.0, 1.5))
        assert found["seconds"]["outrider"].value == 3.0
        assert found["parts"]["outrider"][MODELS].value == 2.0
    whole = findings(summary, rounds=3).tables[0]
    assert [line[:3] for line in whole.lines] == [
        [clock, summary[clock]["seconds"]["transformers"].text(), summary[clock]["seconds"]["outrider"].text()]
        for clock in CLOCKS
    ]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_every_way_reaches_its_first_token(way: Start):
    row = way.run(threads=1)
    if not way.in_parts:
        assert row["cpu"] > 0
        assert row["wall"] > 0
        return
    assert list(row["wall"]) == list(row["cpu"]) == list(PARTS)
    lacking = {OWN, PREPARED} if way.package == "transformers" else set()
    assert {part for part in PARTS if row["cpu"][part] == 0} - {REST} == lacking
