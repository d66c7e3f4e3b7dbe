"""Outputs are written as they end, and a file of them is gone on with."""

import json
import signal
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest

import outrider
from outrider import InputError
from outrider.cli.outputs import OutputFile, Wanted
from outrider.cli.request import DRAWING
from outrider.drafters.model import ModelDrafter
from tests.cli.runs import refused, run, start

PROMPTS = ["--prompt", "Once", "--prompt", "One day", "--prompt", "Tim"]
DRAWN = ["--max-new-tokens", "6", "--temperature", "1", "--seed", "3", "--drafter", "none", "-n", "2"]


def records(file: Path) -> list[dict]:
    """What a file of outputs holds, in order of index."""
    return sorted(map(json.loads, file.read_text().splitlines()), key=lambda record: record["index"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The outputs of three prompts, two of each."""
    file = tmp_path_factory.mktemp("outputs") / "out.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["outrider", "generate", *PROMPTS, *DRAWN, "--output", str(file)])
        from outrider.cli.app import main

        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code
    return file


def test_a_file_of_outputs_numbers_prompts_and_samples(whole):
    found = [(r["index"], r["prompt_index"], r["sample_index"]) for r in records(whole)]
    assert found == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1), (4, 2, 0), (5, 2, 1)]
    assert all(len(r["tokens"]) == 6 for r in records(whole))


def test_samples_have_the_seeds_that_generate_gives_them(whole):
    engine = outrider.load(drafter="none")
    sampling = replace(engine.sampling, temperature=1.0, seed=3)
    outputs = engine.generate(["Once", "One day", "Tim"], n=2, max_new_tokens=6, sampling=sampling)
    assert [record["tokens"] for record in records(whole)] == [output.tokens for output in outputs]


@pytest.mark.parametrize("kept", [0.0, 0.4, 0.999, 1.0])
@pytest.mark.parametrize("tail", [b"", b"\n"])
def test_outputs_that_a_file_holds_are_not_made_again(monkeypatch, capsys, tmp_path, whole, kept, tail):
    content = whole.read_bytes()
    file = tmp_path / "out.jsonl"
    part = content[: int(kept * len(content))].rstrip(b"\n")
    last = part.rpartition(b"\n")[2]
    file.write_bytes(part + (tail if last.endswith(b"}") else b""))
    before = part.count(b'"request"') if last.endswith(b"}") else part.count(b"\n")
    status, out, err = run(monkeypatch, capsys, "generate", *PROMPTS, *DRAWN, "--output", str(file))
    assert (status, out) == (0, ""), err
    assert (f"{before} of 6 outputs are in {file} already" in err) == (before > 0)
    assert [r["tokens"] for r in records(file)] == [r["tokens"] for r in records(whole)]


@pytest.mark.parametrize("command", [["generate", *PROMPTS, "--output"], ["train", "data", "--data", "x", "--out"]])
def test_a_file_that_another_process_writes_is_refused_before_a_model_is_loaded(monkeypatch, capsys, tmp_path, command):
    fcntl = pytest.importorskip("fcntl")
    file = tmp_path / "out.jsonl"
    with (tmp_path / ".out.jsonl.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, out, err = run(monkeypatch, capsys, *command, str(file), "--target", "/no/such/place")
    said = f"error: {file} is being written by another process; wait until that has ended, or give another place\n"
    assert (status, out, err) == (2, "", said)
    assert not file.exists()


def test_nothing_is_loaded_where_all_is_there(monkeypatch, capsys, whole):
    before = whole.read_bytes()
    given = ["--output", str(whole), "--drafter", "model:path=/no/such/place"]
    status, _, err = run(monkeypatch, capsys, "generate", *PROMPTS, *DRAWN, *given)
    assert (status, err) == (0, f"6 of 6 outputs are in {whole} already\n")
    assert whole.read_bytes() == before


@pytest.mark.parametrize("changed", [["--seed", "4"], ["--stop", "x"], ["-n", "3"], ["--prompt", "Tom"]])
def test_outputs_of_other_requests_are_not_mixed_in(monkeypatch, capsys, tmp_path, whole, changed):
    given = [*PROMPTS, *DRAWN, *changed] if changed[0] != "--prompt" else [*changed, *PROMPTS[2:], *DRAWN]
    before = whole.read_bytes()
    status, _, err = run(monkeypatch, capsys, "generate", *given, "--output", str(whole))
    assert (status, "line 1 of" in err and "is the output of another request" in err) == (2, True), err
    assert whole.read_bytes() == before


def test_prompts_can_be_added_behind_the_others(monkeypatch, capsys, tmp_path, whole):
    file = tmp_path / "out.jsonl"
    file.write_bytes(whole.read_bytes())
    status, _, _ = run(monkeypatch, capsys, "generate", *PROMPTS, "--prompt", "Tom", *DRAWN, "--output", str(file))
    assert (status, len(records(file))) == (0, 8)


def test_a_file_of_something_else_is_refused(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("Once upon a time\n{}\n")
    asked = [Wanted(prompt_index=0, sample_index=0, index=0, request="a")]
    with pytest.raises(InputError, match=r"line 1 of .*notes.txt is no output of `outrider generate`"):
        OutputFile(path=file).held(asked)
    assert file.read_text() == "Once upon a time\n{}\n"


@pytest.mark.parametrize("content", [b"Once upon a time", b"Once upon\na time", b"\xff\xfe\x00", b'{"name": "Tim"'])
def test_a_file_of_something_else_keeps_its_last_line(tmp_path, content):
    file = tmp_path / "notes.txt"
    file.write_bytes(content)
    asked = [Wanted(prompt_index=0, sample_index=0, index=0, request="a")]
    with pytest.raises(InputError, match=r"line 1 of .*notes.txt is no output of `outrider generate`"):
        OutputFile(path=file).held(asked)
    assert file.read_bytes() == content


def test_an_interrupt_leaves_the_outputs_that_have_ended(monkeypatch, capsys, tmp_path):
    file = tmp_path / "out.jsonl"
    given = [*PROMPTS, "-n", "7", "--max-slots", "1", "--max-new-tokens", "12", "--temperature", "0"]
    given += ["--drafter", "none", "--ignore-eos", "--output", str(file)]
    with start("generate", *given) as process:
        while process.poll() is None and not (file.exists() and file.read_bytes().count(b"\n") >= 2):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    ended = len(records(file))
    *before, last = err.splitlines()
    assert (process.returncode, last) == (130, f"interrupted after {ended} of 21 outputs")
    # On a busy machine, lines say what takes long; and the newest libraries are not those that were tested.
    assert [line for line in before if not line.endswith(" s)") and "Outrider was not tested with" not in line] == []
    assert 2 <= ended < 21
    status, _, err = run(monkeypatch, capsys, "generate", *given)
    assert (status, f"{ended} of 21 outputs are in {file} already" in err) == (0, True), err
    assert [len(record["tokens"]) for record in records(file)] == [12] * 21


def test_a_request_that_fails_does_not_void_the_others(monkeypatch, capsys):
    begin = ModelDrafter.begin

    def failing(drafter, states, depths):
        if any(state.request.id == "2" for state in states):
            raise RuntimeError("a bad day")
        return begin(drafter, states, depths)

    monkeypatch.setattr(ModelDrafter, "begin", failing)
    given = [*PROMPTS, "--max-new-tokens", "6", "--length", "fixed:3", "--json"]
    status, out, err = run(monkeypatch, capsys, "generate", *given)
    assert (status, err) == (1, "error: prompt 3: RuntimeError: a bad day\n")
    assert sorted(json.loads(line)["index"] for line in out.splitlines()) == [0, 1]


def test_json_says_where_the_time_went(monkeypatch, capsys):
    given = ["generate", *PROMPTS, *DRAWN, "--json"]
    plain = json.loads(run(monkeypatch, capsys, *given)[1].splitlines()[0])
    assert "profile" not in plain
    for line in run(monkeypatch, capsys, *given, "--profile")[1].splitlines():
        record = json.loads(line)
        assert record["profile"]["iterations"] == record["num_steps"]
        assert record["profile"]["ms_per_iteration"]["target"] > 0


def test_several_outputs_are_printed_for_people(monkeypatch, capsys):
    status, out, err = run(monkeypatch, capsys, "generate", *PROMPTS, *DRAWN, "--profile")
    assert status == 0
    assert [f"output {i}: length, 6 tokens" in out for i in range(1, 7)] == [True] * 6
    assert "36 tokens in 36 steps" in err
    assert "where the time of" in err


def test_a_disk_that_is_full_is_one_sentence(monkeypatch, capsys):
    if not Path("/dev/full").exists():
        pytest.skip("needs a device that is always full")
    status, _, err = run(monkeypatch, capsys, "generate", *PROMPTS, *DRAWN, "--output", "/dev/full")
    assert (status, err) == (1, "error: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("place", ["", "file/out.jsonl"])
def test_a_file_that_cannot_be_written_is_named_before_a_model_is_loaded(monkeypatch, capsys, tmp_path, place):
    (tmp_path / "file").write_text("")
    given = ["--prompt", "Once", "--target", "/no/such/place", "--output", str(tmp_path / place)]
    err = refused(monkeypatch, capsys, "generate", *given)
    assert err.startswith(f"error: the output file {tmp_path / place} cannot be written: "), err
    assert err.count("\n") == 1


def test_a_file_that_could_be_written_is_not_left_behind_empty(monkeypatch, capsys, tmp_path):
    given = ["--prompt", "Once", "--target", "/no/such/place", "--output", str(tmp_path / "out.jsonl")]
    assert run(monkeypatch, capsys, "generate", *given)[0] == 2
    assert list(tmp_path.iterdir()) == []


def test_log_probabilities_are_recorded(monkeypatch, capsys, tmp_path):
    given = ["generate", "--prompt", "Once", "--max-new-tokens", "5", "--temperature", "0", "--json"]
    assert "logprobs" not in json.loads(run(monkeypatch, capsys, *given)[1])
    own = json.loads(run(monkeypatch, capsys, *given, "--logprobs", "0")[1])
    assert len(own["logprobs"]) == 5
    assert not own.get("top_logprobs")
    file = tmp_path / "out.jsonl"
    likeliest = json.loads(run(monkeypatch, capsys, *given, "--logprobs", "2", "--output", str(file))[1])
    assert likeliest["logprobs"] == own["logprobs"]
    for token, logprob, top in zip(own["tokens"], own["logprobs"], likeliest["top_logprobs"], strict=True):
        assert (len(top), max(top, key=top.get)) == (2, str(token))
        assert top[str(token)] == pytest.approx(logprob)
    assert records(file) == [likeliest]


def test_a_bias_forbids_a_token(monkeypatch, capsys):
    given = ["generate", "--prompt", "Once", "--max-new-tokens", "3", "--temperature", "0", "--json"]
    first = json.loads(run(monkeypatch, capsys, *given)[1])["tokens"][0]
    forbidden = json.loads(run(monkeypatch, capsys, *given, "--logit-bias", f'{{"{first}": -Infinity}}')[1])["tokens"]
    assert first not in forbidden


def test_every_way_of_drawing_has_an_option():
    # Processors are Python's own objects.
    assert set(DRAWING) == {field.name for field in fields(outrider.Sampling)} - {"processors"}


def test_where_an_output_ends_can_be_said(monkeypatch, capsys):
    given = ["generate", "--prompt", "Once upon a time", "--max-new-tokens", "12", "--temperature", "0", "--json"]
    plain = json.loads(run(monkeypatch, capsys, *given)[1])["tokens"]
    stop = ["--stop-token-ids", str(plain[5]), "--stop-token-ids", str(plain[8])]
    assert json.loads(run(monkeypatch, capsys, *given, *stop)[1])["tokens"] == plain[: plain.index(plain[5]) + 1]
    later = json.loads(run(monkeypatch, capsys, *given, *stop, "--min-tokens", "10")[1])
    assert (len(later["tokens"]) >= 10, plain[5] in later["tokens"][:9]) == (True, False)
    short = ["generate", "--prompt", "The end.", "--max-new-tokens", "200", "--temperature", "0", "--json"]
    ended, going = (json.loads(run(monkeypatch, capsys, *short, *more)[1]) for more in ([], ["--ignore-eos"]))
    assert (ended["finish_reason"], going["finish_reason"]) == ("stop", "length")


def test_an_error_begins_a_line_of_its_own_behind_a_streamed_prompt(monkeypatch, capsys):
    def nothing(drafter, states, depths):
        raise InputError("a bad day")

    monkeypatch.setattr(ModelDrafter, "begin", nothing)
    arguments = ["--prompt", "Once", "--length", "fixed:4"]
    assert run(monkeypatch, capsys, "generate", *arguments) == (2, "Once\n", "error: a bad day\n")
