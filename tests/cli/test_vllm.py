"""`--engine vllm` on commands. vLLM is a fake here: a program that answers as it does."""

import json
import re
import signal
import urllib.error
import urllib.request

import pytest

from tests.cli.runs import done, refused, run, start
from tests.serve.vllm.fakes import fake_python

GREEDY = ("--prompt", "Once upon a time", "--max-new-tokens", "4", "--temperature", "0")


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> tuple[str, ...]:
    return "--engine", "vllm", "--vllm-python", str(fake_python(tmp_path_factory.mktemp("fake")))


def test_generate_writes_the_records_of_our_own_engine(monkeypatch, capsys, engine):
    out = done(monkeypatch, capsys, "generate", *GREEDY, "-n", "2", "--json", *engine)
    record, other = (json.loads(line) for line in sorted(out.splitlines()))
    assert {record["sample_index"], other["sample_index"]} == {0, 1}
    assert (record["text"], len(record["tokens"])) == ("said", 4)
    assert record["num_draft_tokens"] == 4
    assert record["accepted_per_position"] == [1, 1]
    assert record["num_accepted_tokens"] == 2
    assert record["num_steps"] == 3
    assert record["block_efficiency"] == pytest.approx(4 / 3)
    assert record["seconds"] == pytest.approx(0.004)


def test_generate_streams_one_prompt_and_tells_its_counts(monkeypatch, capsys, engine):
    status, out, err = run(monkeypatch, capsys, "generate", *GREEDY, *engine)
    assert status == 0, err
    assert out == "Once upon a timesaid\n"
    assert "4 tokens in 3 steps: block efficiency 1.33, 2 of 4 draft tokens accepted (50%)" in err


def test_chat_talks_to_vllm(monkeypatch, capsys, engine):
    said = iter(["Hello."])
    monkeypatch.setattr("builtins.input", lambda: next(said, "/quit"))
    status, out, err = run(monkeypatch, capsys, "chat", "--temperature", "0", *engine)
    assert (status, out) == (0, "said\n"), err
    assert "[4 tokens, 3 steps, block efficiency 1.33]" in err


def test_a_vllm_that_dies_in_the_middle_is_one_sentence(monkeypatch, capsys, engine):
    status, out, err = run(monkeypatch, capsys, "generate", *GREEDY, "--seed", "2", *engine)
    assert (status, out) == (2, "Once upon a timesa\n")
    assert "ended its answer in the middle; see whether the server still runs" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--min-p", "0.1"], "vLLM does not keep min_p while it drafts"),
        (["--temperature", "1"], "vLLM's build for CPUs makes wrong tokens above temperature 0 while it drafts"),
        (["--logit-bias", '{"3": 1}'], "vLLM does not keep logit_bias while it drafts"),
        (["--learn"], "--learn is not for --engine vllm: train with `outrider learn`"),
        (["--profile"], "--profile is not for --engine vllm: it is about Outrider's own engine; leave it out"),
        (["--url", "http://127.0.0.1:9"], "--engine is not for --url: the server has its own engine"),
        (["--tree", "dynamic"], "vLLM has no tree 'dynamic'"),
        (["--engine-args=--no-such"], "vLLM did not start: no such layer"),
    ],
)
def test_what_vllm_cannot_do_is_one_sentence(monkeypatch, capsys, engine, options, sentence):
    assert sentence in refused(monkeypatch, capsys, "generate", *GREEDY, *engine, *options).splitlines()[-1]


def test_bench_measures_vllm_with_and_without_drafts(monkeypatch, capsys, engine):
    few = ("--num-prompts", "2", "--rounds", "1", "--max-new-tokens", "4", "--temperature", "0", "--json")
    plain, drafting = (json.loads(line) for line in done(monkeypatch, capsys, "bench", *few, *engine).splitlines())
    assert (plain["engine"], plain["speedup"]) == ("vllm, plain", 1)
    assert drafting["engine"] == "vllm, draft_model"
    assert drafting["speculation"]["accepted_per_position"] == [2, 2]
    assert drafting["acceptance_length"] == 2


def test_serve_is_vllms_own_server_which_a_signal_ends_too(engine):
    with start("serve", "--port", "0", "--drafter", "none", "--cors-origin", "*", *engine) as process:
        try:
            line = ""
            while "serving" not in line:
                line = process.stderr.readline()
                assert line, process.wait()
            url = re.search(r"http://[^\s;]+", line)[0]
            with urllib.request.urlopen(f"{url}/v1/models") as answer:
                assert json.load(answer)["data"][0]["id"] == "outrider"
            with urllib.request.urlopen(f"{url}/seen") as answer:
                flags = json.load(answer)["arguments"]
            assert flags[flags.index("--allowed-origins") + 1] == '["*"]'
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 0
            with pytest.raises(urllib.error.URLError):
                urllib.request.urlopen(f"{url}/v1/models")
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "vLLM's build for CPUs makes wrong tokens above temperature 0 while it drafts; serve plainly with"),
        (["--log-answers", "a.jsonl"], "--log-answers is not for --engine vllm: vLLM keeps no answers"),
        (["--admin-key", "a"], "--admin-key is not for --engine vllm: vLLM has no routes of Outrider's"),
        (["--host", "0.0.0.0"], "other machines can reach 0.0.0.0, and no key is set"),
        (["--host", "0.0.0.0", "--weight-updates"], "--weight-updates opens routes that ask for no key"),
        (["--engine-args=--no-such", "--drafter", "none"], "vLLM did not start: no such layer"),
    ],
)
def test_what_vllms_server_shall_not_do_is_refused(monkeypatch, capsys, engine, options, sentence):
    status, _, err = run(monkeypatch, capsys, "serve", "--port", "0", *engine, *options)
    assert (status, sentence in err.splitlines()[-1]) == (2, True), err
