"""Simulated processes along recorded texts: the texts are real ones, the seconds those of the table."""

import pytest

import outrider
from outrider.core.types import Sampling
from outrider.lengths.costs import CostTable
from recipes.length_simulation import POLICY, Lengths
from recipes.length_texts import Text, judged, main, recorded, turn_cost
from recipes.never_loses import Cell
from tests import clocks

COSTS = CostTable.of_formula(lambda requests, length: 1 + 0.1 * (requests - 1) + 0.1 * length)


def texts(accepted: int, count: int = 4, tokens: int = 60) -> list[Text]:
    return [Text(prompt=20, accepted=[accepted] * tokens) for _ in range(count)]


def cell(requests: int = 1, *, temperature: float = 0, seeded: bool = False) -> Cell:
    return Cell(temperature=temperature, seeded=seeded, requests=requests)


def test_recorded_places_lead_through_the_steps_of_a_usual_run():
    engine = outrider.load(max_slots=2, length="fixed:8", probe=False)
    prompts = [engine.encode(text) for text in ("Once upon a time", "One day, a girl")]
    found = recorded(engine, prompts, 0.0, 24)
    greedy = Sampling(temperature=0)
    usual = engine.generate(prompts, max_new_tokens=24, sampling=greedy, ignore_eos=True)
    for text, output, prompt in zip(found, usual, prompts, strict=True):
        assert (text.prompt, len(text.accepted)) == (len(prompt), 24)
        place = steps = 0
        while place < 24:
            place, steps = place + min(text.accepted[place], 24 - place - 1) + 1, steps + 1
        assert steps == output.num_steps


def test_a_turn_costs_what_its_steps_cost_and_what_the_drafter_reads_late():
    [text] = texts(accepted=2, count=1, tokens=9)
    assert turn_cost([text], COSTS, Lengths(0), cell(), slower=0.5) == pytest.approx(9.0)
    # Three steps of three tokens, the first of which reads the prompt.
    late = CostTable(rows=COSTS.rows, catch_up=0.01)
    assert turn_cost([text], late, Lengths(2), cell(), slower=0.5) == pytest.approx(3 * 1.2 * 1.5 + 20 * 0.01)


@pytest.mark.parametrize("state", ["empty", "kept"])
@pytest.mark.parametrize("seeded", [False, True])
def test_the_default_finds_what_is_best(state, seeded):
    asked = cell(2, temperature=1, seeded=seeded)
    with clocks.running():
        good = judged(texts(accepted=8), COSTS, asked, state, processes=3, slower=0.0)
        bad = judged(texts(accepted=0), COSTS, asked, state, processes=3, slower=0.0)
    assert good["best"] == 8
    assert good["over_plain"] > (3 if seeded else 4)
    if state == "kept" and not seeded:
        assert good["over_best"] > 0.99
    assert (bad["best"], bad["gain"]) == (0, 1.0)
    assert 0.9 < bad["over_plain"] <= 1.0


def test_rows_say_how_every_length_does(tmp_path):
    rows = main(tmp_path / "out", requests="1", temperatures="0", texts=2, max_new_tokens=8, processes=1)
    assert {row["state"] for row in rows} == {"empty", "kept"}
    assert all(len(row["fixed"]) == POLICY.most + 1 and row["over_best"] > 0 for row in rows)
    assert "of plain decoding" in (tmp_path / "out" / "table.md").read_text()
