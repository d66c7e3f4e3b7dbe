"""The server under load: the recipe finds what is wrong, and nothing in its quick form."""

import asyncio
from pathlib import Path

import pytest

from outrider.core.inputs import InputError
from recipes import serve_load
from recipes.serve_clients import Answer, Tally, bad_client, good_client
from recipes.serve_load import faults, faults_of_kill, requests_of, slope, summarise

GOOD = {
    "errors": [],
    "left": 0,
    "running": 0.0,
    "wrong_afterwards": [],
    "served_errors": {},
    "finished": 400,
    "slope": 0.001,
}
WRONG = {
    "errors": ["pauses: a client that misbehaves was answered with 500"],
    "left": 1,
    "running": 2.0,
    "wrong_afterwards": ["Answer()"],
    "served_errors": {"outrider:http_requests_total": 3.0},
    "finished": 0,
    "slope": 0.02,
}


def test_each_fault_is_told_and_a_good_run_has_none() -> None:
    assert faults(GOOD) == []
    assert faults({**GOOD, "slope": None}) == []
    for name, value in WRONG.items():
        assert len(faults({**GOOD, name: value})) == 1, name


def test_growth_is_that_of_the_line_behind_the_warm_up() -> None:
    warm = [(100 * i, 1000 + 50 * min(i, 3)) for i in range(4)]
    flat = [(100 * i, 1150) for i in range(4, 12)]
    assert slope([*warm, *flat]) == 0.0
    assert slope([(100 * i, 1_000_000 + 2000 * i) for i in range(12)]) == pytest.approx(0.02, rel=0.02)
    assert slope([(i, 1000 + i) for i in range(20)]) is None


def test_requests_are_always_the_same_and_of_many_lengths() -> None:
    prompts = serve_load.PROMPTS
    found = requests_of(prompts, 40)
    assert found == requests_of(prompts, 40)
    assert len({len(each["prompt"]) for each in found}) > 20
    assert {each["max_tokens"] for each in found} == {1, 8, 24, 64, 96}
    assert all(each["temperature"] == 0 for each in found)


def test_rates_are_compared_within_a_round() -> None:
    rows = [
        {"way": way, "concurrency": 2, "round": k, "tokens": tokens, "seconds": 2.0}
        for k, (one, other) in enumerate([(100, 50), (90, 60), (80, 100)])
        for way, tokens in (("default", one), ("plain", other))
    ]
    [entry] = summarise(rows)
    assert (entry["ratio"], entry["spread"]) == (1.5, [0.8, 2.0])
    assert (entry["default"], entry["plain"]) == (45.0, 30.0)


def test_a_lost_snapshot_and_another_answer_after_a_kill_are_told() -> None:
    good = {"before": ["step-000016"], "after": ["step-000016", "step-000020"], "said": [[200, "a"]]}
    assert faults_of_kill(good, [[200, "a"]]) == []
    for name, value in (("before", []), ("after", ["step-000020"]), ("after", ["step-000016"]), ("said", [[200, "b"]])):
        assert len(faults_of_kill({**good, name: value}, [[200, "a"]])) == 1, (name, value)


def test_clients_tell_of_a_server_that_answers_wrongly() -> None:
    """The server here is a fake: it answers every request with status 500 and the same words."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 500 no\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno")
        await writer.drain()
        writer.close()

    async def run() -> Tally:
        tally = Tally()
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        dice = serve_load.random.Random(1)
        asked = {"prompt": "a", "max_tokens": 2}
        await good_client(port, asked, Answer(status=200, text="a"), tally)
        for _ in range(12):
            await bad_client(port, asked, dice, tally)
        server.close()
        await server.wait_closed()
        return tally

    tally = asyncio.run(asyncio.wait_for(run(), 60))
    assert tally.finished == 1
    assert sum(tally.chaos.values()) == 12
    assert "alone" in tally.errors[0]
    assert any("sends garbage: a body of garbage was answered with 500" in error for error in tally.errors)


def test_a_wrong_way_of_plain_decoding_is_refused() -> None:
    with pytest.raises(InputError, match="--plain must be process or request, got 'x'"):
        serve_load.main(plain="x")


@pytest.mark.slow
def test_the_quick_form_finds_nothing_wrong(tmp_path: Path) -> None:
    summary = serve_load.main(tmp_path / "out", **serve_load.QUICK, threads=1)
    assert summary["faults"] == []
    assert summary["finished"] > 0
    assert summary["chaos"] > 0
    assert [entry["concurrency"] for entry in summary["rates"]] == [2]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"rows.jsonl", "table.md", "report.html", "summary.json", "circumstances.json"} <= names
