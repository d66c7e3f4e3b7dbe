"""`outrider bench` on the command line: a line for each request, a verdict, sentences for wrong input."""

import json

import pytest

from outrider.bench.side_by_side.configuration import PLAIN
from outrider.cli.bench import BenchOptions, plan_of
from outrider.cli.request import RequestOptions
from outrider.embedded import EMBEDDED_DRAFT
from outrider.setup import Setup
from tests.cli.runs import done, refused, run

PAIR = ("--target", str(EMBEDDED_DRAFT), "--drafter", f"model:path={EMBEDDED_DRAFT}")
SHORT = (
    "bench",
    *PAIR,
    "--max-new-tokens",
    "4",
    "--num-prompts",
    "2",
    "--rounds",
    "1",
    "--temperature",
    "0",
    "--peers",
    "",
)


def test_each_request_is_a_line_of_json_and_the_verdict_goes_to_standard_error(monkeypatch, capsys, tmp_path):
    out, file = tmp_path / "out", tmp_path / "profile.json"
    status, told, errors = run(
        monkeypatch, capsys, *SHORT, "--json", "--with", "length=fixed:2", "--out", str(out), "--export", str(file)
    )
    assert status == 0, errors
    lines = [json.loads(line) for line in told.splitlines()]
    assert sorted(line["way"] for line in lines) == ["length=fixed:2"] * 2 + [PLAIN] * 2
    assert {line["num_tokens"] for line in lines} == {4}
    for line in lines:
        assert line["tokens_per_second"] > 0
        assert line["block_efficiency"] == pytest.approx(4 / line["num_steps"])
    assert "Too few runs to judge length=fixed:2" in errors
    assert (out / "report.html").is_file()
    assert json.loads(file.read_text())["num_speculative_tokens"] == 2
    # The second command finds all rows, and says the same.
    again = done(monkeypatch, capsys, *SHORT, "--with", "length=fixed:2", "--out", str(out))
    assert again.startswith("Too few runs to judge length=fixed:2")
    assert PLAIN in again


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--with", "lenght=fixed:2"), "unknown option of a configuration 'lenght'; did you mean 'length'?"),
        (("--with", "length=fixd:2"), "unknown length 'fixd'; did you mean 'fixed'?"),
        (("--sweep", "length"), "names no value"),
        (("--optuna", "3"), "--optuna and --ray measure the points of a sweep"),
        (("--concurrency", "1,x"), "concurrency must be whole numbers >= 1 with commas between them, got '1,x'"),
        (("--rate", "-1"), "rate must be numbers > 0"),
        (("--trace",), "this workload has no arrival times"),
        (("--peers", "vlm"), "unknown peer 'vlm'; did you mean 'vllm'?"),
        (("--objective", "ttft"), "an objective needs milliseconds > 0"),
        (("--workload", "/no/such.jsonl"), "there is no workload /no/such.jsonl"),
        (("--num-prompts", "-2"), "num_prompts must be >= 0"),
        (("--configurations", "/no/such.toml"), "there is no configuration file /no/such.toml"),
    ],
)
def test_wrong_input_is_a_sentence(monkeypatch, capsys, arguments, sentence):
    assert sentence in " ".join(refused(monkeypatch, capsys, "bench", *arguments).split())


def test_the_built_in_prompts_end_within_three_minutes_and_others_when_they_are_done():
    assert plan_of(Setup(), RequestOptions(), BenchOptions(), ()).time_limit == 110
    assert plan_of(Setup(), RequestOptions(), BenchOptions(workload="gsm8k"), ()).time_limit is None
    assert plan_of(Setup(), RequestOptions(), BenchOptions(time_limit=7.0), ()).time_limit == 7


def test_options_become_a_plan():
    request = RequestOptions(temperature=0.5, seed=3, max_new_tokens=9, ignore_eos=True)
    options = BenchOptions(sweep=("length=fixed:1..2",), concurrency="1,4", rate="2", num_prompts=0)
    plan = plan_of(Setup(), request, options, ("name=mine,drafter=suffix",))
    assert [each.name for each in plan.configurations] == ["mine", "length=fixed:1", "length=fixed:2"]
    assert [load.name for load in plan.loads] == ["concurrency 1", "concurrency 4", "2 per second"]
    assert (plan.generation.sampling.temperature, plan.generation.sampling.seed, plan.seed) == (0.5, None, 3)
    assert (plan.generation.max_new_tokens, plan.generation.ignore_eos, plan.num_prompts) == (9, True, None)
    # Without options of its own, outputs are drawn as the model's generation config says.
    assert plan_of(Setup(), RequestOptions(), BenchOptions(), ()).generation.sampling is None
