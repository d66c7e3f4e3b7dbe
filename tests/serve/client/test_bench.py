"""A server is measured over HTTP with the workloads and loads of `outrider bench`."""

import json

import pytest

from outrider.bench.side_by_side.arrivals import ClosedLoop, OpenLoop
from outrider.bench.side_by_side.served import Served
from outrider.serve.client.bench import RemotePlan, measure_remote, summary
from outrider.serve.client.remote import Remote
from tests.cli.runs import run
from tests.serve.served import NAME


def plan(url: str, **fields) -> RemotePlan:
    given = {
        "remote": Remote(url=url),
        "model": NAME,
        "max_context": 512,
        "workload": "built-in",
        "num_prompts": 6,
        "max_new_tokens": 12,
        "fields": {"ignore_eos": True, "temperature": 0},
    }
    return RemotePlan(**given | fields)


@pytest.mark.parametrize("load", [ClosedLoop(concurrency=3), OpenLoop(rate=30)], ids=lambda load: load.name)
def test_every_request_is_played_and_its_tokens_counted(url, load):
    found = plan(url, loads=(load,), rounds=2)
    rows = measure_remote(found)
    assert len(rows) == 2
    for row in rows:
        served = [Served.read(each) for each in row["served"]]
        assert len({each.id for each in served}) == row["requests"] >= 6
        assert {each.num_tokens for each in served} == {12}
        assert all(each.arrived <= each.first <= each.ended for each in served)
        assert row["speculation"]["num_draft_tokens"] >= row["speculation"]["num_accepted_tokens"] > 0
    told = summary(found, rows)
    assert told["tokens"] == sum(row["tokens"] for row in rows)
    assert told["output_throughput"] == pytest.approx(told["tokens"] / told["seconds"])
    assert told["acceptance_length"] > 1
    assert told["ttft"]["mean"] <= told["e2el"]["mean"]


def test_the_command_prints_a_line_for_each_load(monkeypatch, capsys, url):
    options = ["--num-prompts", "4", "--max-new-tokens", "8", "--rounds", "1", "--concurrency", "1,2", "--rate", "20"]
    status, out, err = run(monkeypatch, capsys, "bench", "--url", url, *options, "--json")
    assert (status, err) == (0, "")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [each["load"] for each in lines] == ["concurrency 1", "concurrency 2", "20 per second"]
    status, out, _ = run(monkeypatch, capsys, "bench", "--url", url, *options, "--objective", "ttft:60000")
    assert status == 0
    assert len(out.splitlines()) == 4


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--with", "length=fixed:3"], "--with and --url were given together"),
        (["--sweep", "length=fixed:1..2"], "--sweep is not for servers"),
        (["--target", "x"], "--url and --target were given together"),
    ],
)
def test_what_a_server_cannot_do_is_refused(monkeypatch, capsys, url, options, sentence):
    status, _, err = run(monkeypatch, capsys, "bench", "--url", url, *options)
    assert (status, sentence in err) == (2, True), err
