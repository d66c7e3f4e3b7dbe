"""What the server costs: a step is timed between tokens, differences are of one round, and every part runs."""

import asyncio
from pathlib import Path

import pytest

from outrider.core.inputs import InputError
from recipes import serve_cost
from recipes.serve_clients import Answer, complete, completed
from recipes.serve_cost import asked_of, findings, step_milliseconds, summarise
from tests.serve.served import loaded, serving


def answer(first: float, last: float, steps: int) -> Answer:
    return Answer(status=200, first=first, last=last, steps=steps)


def test_a_step_is_the_time_between_first_and_last_tokens_over_the_steps_between() -> None:
    answers = [answer(0.5, 0.6, 11), answer(0.1, 0.3, 11), answer(0.1, 0.4, 11)]
    assert step_milliseconds(answers) == pytest.approx(20.0)
    with pytest.raises(RuntimeError, match="a request failed"):
        step_milliseconds([answer(0.1, 0.2, 3), Answer(status=500)])


def test_what_the_server_adds_is_taken_within_a_round() -> None:
    rows = [
        {"job": "plain", "side": side, "round": k, "step": value}
        for k, pair in enumerate([(1.0, 1.2), (5.0, 5.1), (2.0, 2.4)])
        for side, value in zip(("engine", "server"), pair, strict=True)
    ]
    [entry] = summarise(rows, "step")
    assert entry["added"]["median"] == pytest.approx(0.2)
    assert entry["engine"]["median"] == 2.0
    rates = [{"way": "outrider", "concurrency": 8, "tokens": 80, "seconds": 2.0}]
    found = findings([entry], [entry], rates, batch=8)
    assert "adds 0.20 ms to a step of 8 requests (goal 0.3)" in found.text
    assert found.tables[2].lines == [[8, "outrider", "40.0 [40.0, 40.0]"]]


def test_a_client_that_reads_at_the_end_reads_what_others_read() -> None:
    asked = {"prompt": "One day", "temperature": 0, "max_tokens": 12}
    with serving(loaded(max_slots=2, max_context=64)) as url:
        port = int(url.rsplit(":", 1)[1])
        alone = asyncio.run(complete(port, asked))
        many = completed(port, [asked, asked, {**asked, "max_tokens": -1}])
    assert [each.said for each in many[:2]] == [alone.said] * 2
    assert len(alone.tokens) == 12
    for each in many[:2]:
        assert each.steps
        assert 0 < each.first <= each.last <= each.seconds
    assert many[2].status == 400
    assert "max_tokens" in many[2].error


def test_prompts_of_two_rounds_share_nothing() -> None:
    texts = ["Once upon", "One day"]
    first, second = (asked_of(texts, number, 4) for number in (1, 2))
    assert len({each["prompt"][:3] for each in (*first, *second)}) == 4


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ways": "plane"}, "--ways must be of plain, drafts"),
        ({"vllm_modes": "eagle", "vllm_python": Path("/no/such")}, "--vllm-modes must be of plain, ngram"),
    ],
)
def test_unknown_ways_are_refused(given: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        serve_cost.main(**given)


@pytest.mark.slow
def test_the_quick_form_measures_both_sides(tmp_path: Path) -> None:
    summary = serve_cost.main(tmp_path / "out", **serve_cost.QUICK, threads=1)
    for name in ("steps", "firsts"):
        [entry] = summary[name]
        assert entry["job"] == "plain"
        assert min(entry[side]["median"] for side in ("engine", "server")) > 0
