"""The doctor names what was planted in a head, in a sentence of its own. The head that ships is the base."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import outrider
from outrider import catalog
from outrider.bench.examination import Examination, Judge, examine
from outrider.core.types import InputError
from outrider.embedded import ASSETS, EMBEDDED_HEAD, EMBEDDED_TARGET
from tests.cli.runs import run
from tests.world.block_checkpoints import BLOCK, checkpoints, markov, trunk
from tests.world.published import eagle3
from tests.world.tokenizers import letters
from tests.world.zoo import VOCAB, tiny

TAPS = (2, 6, 11)
Plant = Callable[[Path, dict[str, Any], dict[str, Tensor]], None]


@pytest.fixture(scope="module")
def judge() -> Judge:
    """What the embedded target says."""
    lines = [json.loads(line) for line in (ASSETS / "prompts.jsonl").read_text().splitlines()]
    prompts = [line["prompt"] for line in lines if isinstance(line.get("prompt"), str)][:4]
    engine = outrider.load(drafter="none", length="fixed:1", dtype="float32", max_slots=4)
    return Judge.listening(engine, prompts, max_new_tokens=20)


def planted(folder: Path, plant: Plant) -> str:
    """The head that ships, with something changed."""
    config = json.loads((EMBEDDED_HEAD / "config.json").read_text())
    tensors = load_file(EMBEDDED_HEAD / "model.safetensors")
    plant(folder, config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def told(found: Examination) -> dict[str, str]:
    """The sentence of each finding."""
    return {each.about: each.sentence for each in found.findings}


def without_a_tensor(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    del tensors["layers.0.mlp.up_proj.weight"]


def with_a_strange_tensor(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["gate.weight"] = torch.ones(3)


def with_another_rotary_base(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 3.0


def with_swapped_columns(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight"] = torch.cat(list(reversed(tensors["fc.weight"].chunk(2, -1))), -1)


def with_a_strange_embedding(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    [name] = [each for each in load_file(EMBEDDED_TARGET / "model.safetensors") if each.endswith("embed_tokens.weight")]
    tensors["embed_tokens.weight"] = load_file(EMBEDDED_TARGET / "model.safetensors")[name].flip(0).contiguous()
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"].to(torch.bfloat16)


def in_another_dtype(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors.update({name: tensor.half() for name, tensor in tensors.items()})


def with_another_template(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def with_a_short_context(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["max_position_embeddings"] = 64


def with_a_better_past(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    (folder / "training").mkdir()
    line = {"kind": "watch", "step": 9, "accepted": [1.0, 0.98, 0.97]}
    (folder / "training" / "log.jsonl").write_text(json.dumps(line) + "\n")


def of_another_target(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["outrider_target"]["num_layers"] = 6


FAULTS: dict[str, tuple[Plant, str]] = {
    "files: missing": (without_a_tensor, "up_proj.weight is missing"),
    "files: strange": (with_a_strange_tensor, "gate.weight is not part of such a head"),
    "files: target": (of_another_target, "was trained for a target with 6 layers"),
    "rotary base": (with_another_rotary_base, "Its rotary base is 3 and the target's is 10000"),
    "columns of fc": (with_swapped_columns, "swap their halves in its file"),
    "embedding": (with_a_strange_embedding, "remove embed_tokens.weight from its file"),
    "dtype": (in_another_dtype, "Its config says bfloat16, and its tensors are float16"),
    "chat template": (with_another_template, "The chat template beside it is not the target's"),
    "context": (with_a_short_context, "It was made for 64 positions"),
    "training": (with_a_better_past, "Its trainer measured 3.95 tokens per step"),
}


def test_nothing_is_found_in_the_head_that_ships(judge):
    found = examine(str(EMBEDDED_HEAD), judge)
    assert not found.findings, found.findings
    assert found.kind == "eagle"
    assert found.tokens_per_step is not None
    assert found.tokens_per_step > 2
    assert found.best == found.tokens_per_step


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(tmp_path, judge, name):
    plant, words = FAULTS[name]
    found = examine(planted(tmp_path, plant), judge)
    about = name.partition(":")[0]
    assert words in told(found)[about], found.findings
    assert set(told(found)) == {about}, found.findings
    assert all("\n" not in each.sentence and each.sentence.endswith(".") for each in found.findings)


@pytest.fixture(scope="module")
def fitted(judge, tmp_path_factory) -> Path:
    """An EAGLE-3 head that knows by heart what the target says here: its fusion gives the target's next last state."""
    spec = catalog.rows("drafter")["eagle3"].kind
    made = spec.learner(spec.options(taps=TAPS), judge.context)
    head, rows = made.head, judge.batch.lengths.tolist()
    read = torch.cat([judge.batch.hidden[tap] for tap in TAPS], -1)
    last = judge.batch.hidden[judge.context.info.num_layers]
    now = torch.cat([each[: size - 1] for each, size in zip(read, rows, strict=True)])
    after = torch.cat([each[1:size] for each, size in zip(last, rows, strict=True)])
    assert len(now) < now.shape[1]
    with torch.no_grad():
        head.fc.weight.copy_(torch.linalg.lstsq(now.double(), after.double(), driver="gelsd").solution.T)
        head.norm.weight.copy_(judge.model.model.norm.weight)
        head.layers[0].self_attn.o_proj.weight.zero_()
        head.layers[0].mlp.down_proj.weight.zero_()
        # So that a residual that is normed is another one.
        head.layers[0].hidden_norm.weight.copy_(torch.linspace(-1, 2, len(head.norm.weight)))
    folder = tmp_path_factory.mktemp("fitted")
    made.write(folder)
    return folder


READINGS: dict[str, tuple[dict[str, Any], str, str]] = {
    "later": ({"taps": tuple(tap + 1 for tap in TAPS)}, "taps", "say taps=2x6x11 behind its path"),
    "earlier": ({"taps": tuple(tap - 1 for tap in TAPS)}, "taps", "say taps=2x6x11 behind its path"),
    "order": ({"taps": (11, 6, 2)}, "taps", "say taps=2x6x11 behind its path"),
    "residual": ({"norm_before_residual": True}, "residual", "write norm_before_residual false into its config"),
}


@pytest.mark.parametrize("name", READINGS)
def test_a_wrong_word_on_taps_or_norms_is_named(tmp_path, judge, fitted, name):
    wrong, about, words = READINGS[name]
    shutil.copytree(fitted, tmp_path / "head")
    config = json.loads((fitted / "config.json").read_text())
    if "taps" in wrong:
        config["outrider_target"]["taps"] = list(wrong["taps"])
    else:
        config |= wrong
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    found = examine(str(tmp_path / "head"), judge)
    assert words in told(found)[about], found
    assert found.best > max(1.9, found.tokens_per_step + 0.1)


def test_what_a_better_reading_brings_is_said_with_figures(tmp_path, judge):
    whole = examine(str(EMBEDDED_HEAD), judge)
    found = examine(planted(tmp_path, with_swapped_columns), judge)
    assert found.best == pytest.approx(whole.tokens_per_step, abs=1e-3)
    assert found.tokens_per_step < whole.tokens_per_step - 0.5
    assert f"{found.best:.2f} tokens and not {found.tokens_per_step:.2f}" in told(found)["columns of fc"]


def test_the_command_prints_a_sentence_for_each_finding(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "text.txt").write_text("Once upon a time, there was a little fox who lived near a")
    head = planted(tmp_path, without_a_tensor)
    given = ("doctor", head, "--text", str(tmp_path / "text.txt"), "--max-slots", "1")
    status, out, err = run(monkeypatch, capsys, *given)
    assert (status, out.count("\n- "), out.startswith("- files: The tensors in")) == (0, 0, True), (out, err)
    status, out, _ = run(monkeypatch, capsys, *given, "--json")
    assert [each["about"] for each in json.loads(out)["findings"]] == ["files"]
    status, _, err = run(monkeypatch, capsys, *given, "--drafter", "ngram")
    assert (status, "not both" in " ".join(err.split())) == (2, True), err


@pytest.fixture(scope="module")
def small() -> Judge:
    """What a tiny target says."""
    engine = outrider.load(tiny("llama").float(), drafter="none", length="fixed:1", tokenizer=letters(), max_slots=4)
    return Judge.listening(engine, [[5, 6, 7], [9, 8, 7, 6], [11, 4], [3, 12, 30]], max_new_tokens=20)


def test_a_stale_list_of_tokens_is_named(tmp_path, small):
    tensors = eagle3(tmp_path, small.context.info)
    file = tmp_path / "model.safetensors"
    tensors["t2d"] = tensors["t2d"].roll(1)
    save_file(
        {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}, file
    )
    found = told(examine(str(tmp_path), small))
    assert "Its two lists of tokens contradict each other" in found["vocabulary map"]
    assert "of what the target says here are among them" in found["vocabulary"]


def test_what_no_head_that_guesses_blocks_should_say_is_named(tmp_path, small):
    made = checkpoints(VOCAB)["dflash"]
    text = small.documents[0].tokens
    made.config["mask_token_id"] = int(text[-1])
    made.config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = BLOCK + 3
    made.tensors["verifier_lm_head.weight"] = torch.randn(VOCAB, 32).double()
    found = told(examine(made.save(tmp_path / "dflash"), small))
    assert "stands" in found["mask token"]
    assert f"Its block has {BLOCK} positions, and its config drafts {BLOCK + 3} tokens" in found["block size"]
    assert "Its copy of the target's output layer is not this target's" in found["output layer"]


def test_a_question_is_answered_by_trying(tmp_path, small):
    made = checkpoints(VOCAB)["dspark-flat"]
    del made.config["sample_from_anchor"]
    made.tensors = {**trunk(2, VOCAB), **markov("vanilla", VOCAB, VOCAB)}
    found = told(examine(made.save(tmp_path / "dspark"), small))
    assert "The files leave open sample_from_anchor; with sample_from_anchor=" in found["questions"]


def test_a_drafter_that_is_no_head_is_refused(tmp_path, judge):
    shutil.copytree(ASSETS / "draft", tmp_path / "draft")
    with pytest.raises(InputError, match="holds no head; for other drafters use --drafter"):
        examine(str(tmp_path / "draft"), judge)
