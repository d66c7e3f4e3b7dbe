"""A server is measured over HTTP with the workloads and loads of `outrider bench`."""

import json

import pytest

from outrider.bench.side_by_side.served import Served
from outrider.cli.bench import BenchOptions
from outrider.cli.bench_url import measure, summary
from outrider.cli.request import RequestOptions
from outrider.serve.client.remote import Remote
from tests.cli.runs import run
from tests.serve.served import NAME


@pytest.mark.parametrize("load", [{"concurrency": "3"}, {"rate": "30"}], ids=str)
def test_every_request_is_played_and_its_tokens_counted(url, load):
    request = RequestOptions(max_new_tokens=12, temperature=0, ignore_eos=True)
    options = BenchOptions(num_prompts=6, rounds=2, **load)
    rows = measure(Remote(url=url), {"id": NAME, "max_model_len": 512}, request, options)
    assert len(rows) == 2
    for row in rows:
        served = [Served.read(each) for each in row["served"]]
        assert len({each.id for each in served}) == row["requests"] >= 6
        assert {each.num_tokens for each in served} == {12}
        assert all(each.arrived <= each.first <= each.ended for each in served)
        assert row["speculation"]["num_draft_tokens"] >= row["speculation"]["num_accepted_tokens"] > 0
    told = summary(rows)
    assert told["tokens"] == sum(row["tokens"] for row in rows)
    assert told["output_throughput"] == pytest.approx(told["tokens"] / told["seconds"])
    assert told["acceptance_length"] > 1
    assert told["speculation"]["num_drafts"] == sum(row["speculation"]["num_drafts"] for row in rows)
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
        (["--with", "length=fixed:3"], "--with is not for --url: a server has one configuration"),
        (["--sweep", "length=fixed:1..2"], "--sweep is not for --url"),
        (["--target", "x"], "--target is not for --url: the server has its own setup"),
        (["--engine", "vllm"], "--engine is not for --url: the server has its own engine"),
    ],
)
def test_what_a_server_cannot_do_is_refused(monkeypatch, capsys, url, options, sentence):
    status, _, err = run(monkeypatch, capsys, "bench", "--url", url, *options)
    assert (status, sentence in err) == (2, True), err
