"""`outrider train distill`: the whole of a user's work."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import outrider
from outrider.training.loop.journal import read
from tests.cli.runs import run, run_apart
from tests.world.tokenizers import byte_level, letters
from tests.world.zoo import tiny

SETTINGS = {"steps": 4, "num-rows": 2, "max-length": 24, "save-every": 2, "watch-every": 2, "depth": 2}
FEW = tuple(each for name, value in SETTINGS.items() for each in (f"--{name}", str(value)))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, ...]:
    """The options that name a tiny target, a tiny draft model and a tiny corpus."""
    for seed, name in enumerate(("target", "draft")):
        tiny("llama", seed=seed).float().save_pretrained(tmp_path / name)
        letters().save_pretrained(tmp_path / name)
    lines = [{"tokens": [5 + (i + j) % 40 for j in range(20)], "start": 6} for i in range(12)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    named = {"target": "target", "drafter": "draft", "data": "data.jsonl", "out": "out"}
    return tuple(each for name, place in named.items() for each in (f"--{name}", str(tmp_path / place)))


@pytest.mark.parametrize("texts", ["fixed", "on_policy", "mixed:share=0.5"])
def test_one_command_trains_a_drafter_and_reports(monkeypatch, capsys, tmp_path, pair, texts: str) -> None:
    status, out, err = run(monkeypatch, capsys, "train", "distill", *pair, *FEW, "--texts", texts, "--json")
    assert status == 0, err
    record = json.loads(out)
    assert record["before"]["block_efficiency"] >= 1
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.float32
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == letters().get_vocab()
    engine = outrider.load(str(tmp_path / "target"), drafter=f"model:path={tmp_path / 'out'}")
    assert engine.generate([[5, 6, 7]], max_new_tokens=4)[0].tokens
    report = Path(record["report"]).read_text()
    assert "acceptance by position, temperature 1" in report
    assert "first 2" in report
    assert "divergence" in report
    assert "<svg" in report


def test_the_target_answers_the_prompts_first(monkeypatch, capsys, tmp_path, pair) -> None:
    options = (*pair, *FEW, "--texts", "target", "--divergence", "tvd")
    status, _, err = run(monkeypatch, capsys, "train", "distill", *options)
    assert status == 0, err
    answers = [json.loads(line) for line in (tmp_path / "out" / "training" / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 12
    assert "block efficiency on held-out texts" in err


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_captured_states_train_the_same_draft_model(monkeypatch, capsys, tmp_path, pair) -> None:
    assert run(monkeypatch, capsys, "train", "distill", *pair, *FEW)[0] == 0
    plain = weights(tmp_path / "out")
    given = [*pair, *FEW, "--capture"]
    given[given.index("--out") + 1] = str(tmp_path / "again")
    status, _, err = run(monkeypatch, capsys, "train", "distill", *given)
    assert status == 0, err
    assert (tmp_path / "again" / "training" / "states" / "manifest.json").is_file()
    for name, tensor in weights(tmp_path / "again").items():
        assert torch.allclose(tensor, plain[name], atol=1e-5), name


def test_positions_change_what_is_learnt(monkeypatch, capsys, tmp_path, pair) -> None:
    # The last 32 tokens of a text have no gap between them.
    lines = [{"tokens": [5 + (i + j) % 40 for j in range(60)], "start": 6} for i in range(12)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = [*pair, *FEW]
    given[given.index("--max-length") + 1] = "60"
    assert run(monkeypatch, capsys, "train", "distill", *given)[0] == 0
    status, _, err = run(monkeypatch, capsys, "train", "distill", *given, "--positions", "gaps")
    assert status == 2
    assert "holds a run with positions 'plain' instead of 'gaps'" in err
    given[given.index("--out") + 1] = str(tmp_path / "gaps")
    assert run(monkeypatch, capsys, "train", "distill", *given, "--positions", "gaps")[0] == 0
    plain, gaps = weights(tmp_path / "out"), weights(tmp_path / "gaps")
    assert any(not torch.equal(tensor, gaps[name]) for name, tensor in plain.items())


def test_the_same_command_goes_on_and_other_settings_are_refused(monkeypatch, capsys, tmp_path, pair) -> None:
    assert run(monkeypatch, capsys, "train", "distill", *pair, *FEW)[0] == 0
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert run(monkeypatch, capsys, "train", "distill", *pair, *FEW)[0] == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    status, _, err = run(monkeypatch, capsys, "train", "distill", *pair, *FEW, "--divergence", "rkl", "--seed", "3")
    assert status == 2
    assert "holds a run with divergence 'fkl' instead of 'rkl'" in err
    assert "seed 0 instead of 3; give these, or another folder" in err


def test_wrong_input_gets_one_sentence_and_leaves_nothing(monkeypatch, capsys, tmp_path, pair) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    byte_level(300).save_pretrained(tmp_path / "other")
    tiny("llama", seed=1).float().save_pretrained(tmp_path / "other")
    for option, value, message in [
        ("--divergence", "fkll", "unknown divergence 'fkll'; did you mean 'fkl'?"),
        ("--texts", "policy", "unknown data 'policy'; use fixed, target, on_policy or mixed:share=0.5"),
        ("--steps", "0", "steps must be >= 1, got 0"),
        ("--positions", "gap", "unknown positions 'gap'; use plain, padding or gaps"),
        ("--precision", "fp8", "precision must be one of no, bf16, fp16, got 'fp8'"),
        ("--data", str(tmp_path / "empty.jsonl"), "the corpus is empty"),
        ("--drafter", str(tmp_path / "nowhere"), "there is no directory"),
        ("--drafter", str(tmp_path / "other"), "has another tokenizer than the target"),
    ]:
        given = [*pair, *FEW]
        if option in given:
            given[given.index(option) + 1] = value
        else:
            given += [option, value]
        status, _, err = run(monkeypatch, capsys, "train", "distill", *given)
        assert status == 2, (option, value, err)
        assert message in " ".join(err.split()), (option, value, err)
    status, _, err = run(monkeypatch, capsys, "train", "distill", *pair, *FEW, "--texts", "on_policy", "--capture")
    assert status == 2
    assert "capture needs texts that stay as they are" in " ".join(err.split())
    assert not (tmp_path / "out" / "config.json").exists()


def test_training_without_a_report_library_still_ends_well(tmp_path, pair) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "matplotlib.py").write_text("raise ModuleNotFoundError('no matplotlib', name='matplotlib')")
    found = run_apart("train", "distill", *pair, *FEW, path=hidden)
    assert found.returncode == 0, found.stderr
    assert "the report needs matplotlib" in found.stderr
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert read(tmp_path / "out" / "training" / "log.jsonl")
