"""outrider plan: one sentence, a table or JSON; a configuration that other commands read; wrong input."""

import json

import pytest

from outrider.setup import Setup
from tests.cli.runs import done, refused, run

SMALL = (
    "plan",
    *("--num-prompts", "2", "--max-new-tokens", "5", "--temperature", "1", "--seed", "0"),
    # Costs of a data sheet, so that nothing is timed.
    *("--devices", "h100", "--requests", "1,4"),
)


def test_without_a_terminal_lines_say_what_is_being_done(monkeypatch, capsys):
    for name in ("PATIENCE", "PERIOD", "BEAT"):
        monkeypatch.setattr(f"outrider.core.progress.{name}", 0.001)
    status, _, err = run(monkeypatch, capsys, *SMALL)
    assert status == 0, err
    assert "planning; recording what the target writes and what each drafter guesses (" in err


def test_a_plan_is_one_object_and_its_record_serves_again(monkeypatch, capsys, tmp_path):
    record, chosen = tmp_path / "run.npz", tmp_path / "plan.toml"
    more = ("--record", str(record), "--apply", str(chosen), "--rate", "2", "--for", "llama.cpp", "--json")
    found = json.loads(done(monkeypatch, capsys, *SMALL, *more))
    assert [each["requests"] for each in found["plans"]] == [1, 4]
    for each in found["plans"]:
        assert each["chosen"] == each["predictions"][0]["name"]
        assert {"plain", "model, chain of 4, block"} <= {one["name"] for one in each["predictions"]}
        for one in each["predictions"]:
            assert 1 <= one["block_efficiency"]["value"] <= 9
            assert one["speedup"]["low"] <= one["speedup"]["value"] <= one["speedup"]["high"]
    assert {each["rate"] for each in found["loads"]} == {2.0}
    options = found["plans"][0]["options"]
    assert {name: getattr(Setup.read(chosen), name) for name in options} == options
    assert json.loads(done(monkeypatch, capsys, *SMALL, *more)) == found
    assert "is of other sampling" in refused(monkeypatch, capsys, *SMALL, *more, "--top-k", "5")


def test_people_get_a_sentence_first(monkeypatch, capsys):
    told = done(monkeypatch, capsys, *SMALL)
    assert told.startswith(("Use ", "Do not speculate"))
    assert "1 at once" in told
    assert "times are estimated from a roofline, not measured" in told


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (("--length", "fixed:3"), "plan compares all trees, verifiers and lengths; leave out --length"),
        (("--requests", "two"), "requests must be whole numbers >= 1"),
        (("--devices", "h10"), "did you mean 'h100'"),
        (("--for", "vlm"), "did you mean 'vllm'"),
        (("--context", "0"), "context must be >= 1"),
        (("--num-prompts", "-1"), "num_prompts must be >= 0"),
        (("--with", "ngrm"), "did you mean 'ngram'"),
        (("--repetition-penalty", "1.5"), "penalties and processors that read the text cannot be planned"),
    ],
)
def test_wrong_input_is_told_in_a_sentence(monkeypatch, capsys, given, complaint):
    assert complaint in refused(monkeypatch, capsys, *SMALL, *given)
