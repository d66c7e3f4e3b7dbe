"""`outrider train`: draft models, steered ones and every head of the catalog, from a target and texts to a drafter."""

import json
import re
import sys
from dataclasses import fields
from pathlib import Path

import datasets
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import outrider
from outrider import catalog
from outrider.drafters.steering import read_steering
from outrider.heads.objective import HeadObjective
from outrider.learning.batch import TrainBatch
from outrider.learning.options import SIZE
from outrider.lm.hf.checkpoint import read_config
from outrider.training import task
from outrider.training.loop.journal import read
from tests.cli.runs import done, refused, run
from tests.world.heads import HEADS, TRAINED
from tests.world.tokenizers import byte_level, letters
from tests.world.zoo import tiny

SETTINGS = {"steps": 4, "batch-size": 2, "max-length": 24, "save-every": 2, "watch-every": 2, "depth": 2}
FEW = tuple(each for name, value in SETTINGS.items() for each in (f"--{name}", str(value)))
GREEDY = outrider.Sampling(temperature=0)
every_head = pytest.mark.parametrize("kind", TRAINED)


def lines(count: int = 12, length: int = 20) -> list[dict[str, object]]:
    """Texts as tokens."""
    return [{"tokens": [5 + (i + j) % 40 for j in range(length)], "start": 6} for i in range(count)]


@pytest.fixture
def pair(tmp_path: Path, capsys) -> tuple[str, ...]:
    """The options that name a tiny target, a tiny draft model and a tiny corpus."""
    for seed, name in enumerate(("target", "draft")):
        tiny("llama", seed=seed).float().save_pretrained(tmp_path / name)
        letters().save_pretrained(tmp_path / name)
    # The first one of a process that saves a model is shown a bar.
    capsys.readouterr()
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines()))
    named = {"target": "target", "drafter": "draft", "data": "data.jsonl", "out": "out"}
    return tuple(each for name, place in named.items() for each in (f"--{name}", str(tmp_path / place)))


@pytest.fixture
def alone(pair: tuple[str, ...]) -> tuple[str, ...]:
    """The same without the draft model, as commands of heads want it."""
    at = pair.index("--drafter")
    return (*pair[:at], *pair[at + 2 :])


def changed(given: tuple[str, ...], **values: object) -> list[str]:
    """The options with other values."""
    options = list(given)
    for name, value in values.items():
        option = f"--{name.replace('_', '-')}"
        if option in options:
            options[options.index(option) + 1] = str(value)
        else:
            options += [option, str(value)]
    return options


def assert_drafts(target: Path, drafter: str, tree: str = "chain") -> None:
    """A drafter drafts, and greedy output is the target's."""
    engine = outrider.load(str(target), drafter=drafter, tree=tree, length="fixed:2")
    [made] = engine.generate([[5, 6, 7]], max_new_tokens=8, sampling=GREEDY)
    assert made.num_draft_tokens > 0
    [plain] = engine.plain().generate([[5, 6, 7]], max_new_tokens=8, sampling=GREEDY)
    assert made.tokens == plain.tokens


@every_head
def test_one_command_trains_a_head(monkeypatch, capsys, tmp_path, alone, kind) -> None:
    record, place = json.loads(done(monkeypatch, capsys, "train", kind, *alone, *FEW, "--json")), str(tmp_path / "out")
    assert record["after"]["block_efficiency"] >= 1
    assert catalog.name_of(catalog.make("drafter", place)) == kind
    assert_drafts(tmp_path / "target", place, record.get("tree", "chain"))


@pytest.mark.parametrize("has_products", [True, False])
def test_a_target_in_bfloat16_computes_in_float32_where_there_are_no_products_in_bfloat16(
    monkeypatch, capsys, tmp_path, alone, has_products
) -> None:
    tiny("llama").bfloat16().save_pretrained(tmp_path / "target")
    monkeypatch.setattr(task, "keeps_bits", lambda device, dtype: has_products)
    read, seen = HeadObjective.with_states, set[torch.dtype]()

    def watched(objective: HeadObjective, batch: TrainBatch) -> TrainBatch:
        found = read(objective, batch)
        seen.update(states.dtype for states in found.hidden.values())
        return found

    monkeypatch.setattr(HeadObjective, "with_states", watched)
    status, _, err = run(monkeypatch, capsys, "train", "eagle3", *alone, *FEW)
    assert status == 0, err
    assert seen == {torch.bfloat16 if has_products else torch.float32}
    assert ("the target computes in float32: this CPU has no products in bfloat16" in err) == (not has_products)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values() if tensor.is_floating_point()} == {torch.bfloat16}


# That every head can be trained further is tested where the heads are.
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_one_command_trains_a_head_further(monkeypatch, capsys, tmp_path, alone, kind) -> None:
    done(monkeypatch, capsys, "train", kind, *alone, *FEW)
    place = str(tmp_path / "out")
    further = [*changed((*alone, *FEW), out=tmp_path / "further", steps=1), "--init-from", place]
    status, _, err = run(monkeypatch, capsys, "train", kind, *further)
    assert status == 0, err
    assert f"the drafter is in {tmp_path / 'further'}; use it with --drafter {kind}:path=" in err
    assert read_config(str(tmp_path / "further")) == read_config(place)


@every_head
def test_what_a_head_on_disk_fixes_is_refused_by_name(monkeypatch, capsys, tmp_path, alone, kind) -> None:
    options = HEADS[kind].options
    sizes = [each for each in fields(options) if each.name in options.of_kinds(SIZE)]
    for each in sizes:
        option = f"--{each.name.replace('_', '-')}"
        # A number that stands for none is 2; one for several numbers too.
        value = () if isinstance(each.default, bool) else (str(each.default or 2),)
        status, _, err = run(monkeypatch, capsys, "train", kind, *alone, "--init-from", "there", option, *value)
        assert (status, err.startswith(f"error: {each.name}: the head in there says it; leave it out")) == (2, True), (
            err
        )
    assert not (tmp_path / "out").exists()


def test_options_of_a_head_reach_it(monkeypatch, capsys, tmp_path, alone) -> None:
    more = ("--taps", "0x1x3", "--draft-vocab", "20", "--fc-norm", "--capture", "--slot-balanced")
    done(monkeypatch, capsys, "train", "eagle3", *alone, *FEW, *more)
    config = read_config(str(tmp_path / "out"))
    assert (config["eagle_aux_hidden_state_layer_ids"], config["draft_vocab_size"]) == ([0, 1, 3], 20)
    assert (tmp_path / "out" / "training" / "states" / "manifest.json").is_file()
    assert_drafts(tmp_path / "target", str(tmp_path / "out"))


def test_heads_of_one_depth_each_come_with_a_tree(monkeypatch, capsys, tmp_path, alone) -> None:
    more = ("--layers", "2", "--tree-nodes", "5", "--regenerate")
    status, _, err = run(monkeypatch, capsys, "train", "medusa", *alone, *FEW, *more)
    assert status == 0, err
    assert (tmp_path / "out" / "training" / "answers.jsonl").is_file()
    assert "tree: fixed:children=" in err
    config = read_config(str(tmp_path / "out"))
    assert (config["num_heads"], config["num_hidden_layers"]) == (2, 2)


@pytest.mark.parametrize(
    ("kind", "wrong", "message"),
    [
        ("eagle", ("--divergence", "kl"), "unknown divergence"),
        ("eagle", ("--decay", "0"), "decay must be > 0"),
        ("eagle", ("--init-from", "/nowhere"), "there is no directory /nowhere"),
        ("eagle", ("--watch-temperature", "2"), "watch_temperature must be one of 0, 1, got 2"),
        ("eagle", ("--held-out", "/nowhere"), "/nowhere"),
        ("eagle", ("--column", "prompt"), "--column must be a pair such as prompt=question, got 'prompt'"),
        ("eagle", ("--draft-vocab", "5"), "No such option"),
        ("eagle3", ("--draft-vocab", "999"), "the draft vocabulary must have 1..64 tokens, got 999"),
        ("eagle3", ("--taps", "3,1"), "taps must be whole numbers joined by x"),
        ("poss", ("--norm-output",), "norm_output: for trunk eagle3 alone"),
        ("parallel", ("--depth", "3", "--slots", "1"), "so a depth of 3 cannot be watched"),
        ("dflash", ("--block-size", "2"), "a block of 2 guesses 1 tokens, and depth is 2"),
        ("dflash", ("--mask-token-id", "999"), "mask_token_id must be in 0..63"),
        ("blockwise", ("--ngram-order", "7"), "ngram_order must be one of 0, 1, 2, 3, 4, got 7"),
    ],
)
def test_wrong_options_of_heads_get_one_sentence(monkeypatch, capsys, tmp_path, alone, kind, wrong, message) -> None:
    assert message in " ".join(refused(monkeypatch, capsys, "train", kind, *alone, *FEW, *wrong).split())
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("command", ["eagle3", "distill"])
def test_an_estimate_tells_memory_and_hours_and_trains_nothing(monkeypatch, capsys, tmp_path, pair, alone, command):
    given = pair if command == "distill" else alone
    for weights in tmp_path.rglob("*.safetensors"):
        # Configs and tokenizers are enough.
        weights.unlink()
    out = done(monkeypatch, capsys, "train", command, *given, *FEW, "--estimate", "--json")
    [(name, said)] = json.loads(out).items()
    assert name == "estimate"
    assert "parameters" in said
    assert " of memory: Python and its libraries" in said
    assert "hours" in said
    assert not list((tmp_path / "out").rglob("*.safetensors"))
    status, out, err = run(monkeypatch, capsys, "train", command, *given, *FEW, "--estimate")
    assert (status, out, "hours" in err) == (0, "", True)


@pytest.mark.parametrize("more", [(), ("--estimate",)])
def test_a_target_that_is_not_there_is_called_a_model(monkeypatch, capsys, tmp_path, alone, more) -> None:
    given = changed((*alone, *FEW), target=tmp_path / "nothing")
    said = " ".join(refused(monkeypatch, capsys, "train", "eagle", *given, *more).split())
    assert "model" in said
    assert "tokenizer" not in said


def test_a_head_with_a_list_of_tokens_learns_further(monkeypatch, capsys, tmp_path, alone) -> None:
    done(monkeypatch, capsys, "train", "eagle", *alone, *FEW)
    (tmp_path / "tokens.txt").write_text("\n".join(map(str, range(16))))
    place = f"{tmp_path / 'out'},token_map={tmp_path / 'tokens.txt'}"
    further = [*changed((*alone, *FEW), out=tmp_path / "further", steps=1), "--init-from", place]
    assert "hours" in done(monkeypatch, capsys, "train", "eagle", *further, "--estimate", "--json")
    out = done(monkeypatch, capsys, "train", "eagle", *further, "--json")
    assert json.loads(out)["step"] == 1
    assert_drafts(tmp_path / "target", f"eagle:path={tmp_path / 'further'},token_map={tmp_path / 'tokens.txt'}")


def test_a_split_to_watch_and_columns_with_other_names_are_read(monkeypatch, capsys, tmp_path, alone) -> None:
    splits = {name: datasets.Dataset.from_list(lines(count)) for name, count in (("train", 8), ("test", 3))}
    saved = datasets.DatasetDict({name: rows.rename_column("tokens", "ids") for name, rows in splits.items()})
    saved.save_to_disk(str(tmp_path / "splits"))
    given = changed((*alone, *FEW), data=tmp_path / "splits", held_out=tmp_path / "splits")
    given += ["--held-out-split", "test", "--column", "tokens=ids"]
    status, _, err = run(monkeypatch, capsys, "train", "eagle", *given)
    assert status == 0, err
    assert "8 documents to learn from, 3 to watch" in err


@pytest.mark.parametrize("more", [(), ("--rank", "2", "--frozen", "--positions", "gaps", "--taps", "3x1")])
def test_one_command_trains_a_steered_drafter(monkeypatch, capsys, tmp_path, pair, more) -> None:
    out = done(monkeypatch, capsys, "train", "steer", *pair, *FEW, *more, "--json")
    assert json.loads(out)["after"]["block_efficiency"] >= 1
    config = read_steering(str(tmp_path / "out")).config
    assert (config.rank, config.taps) == ((2, (3, 1)) if more else (None, (2, 1)))
    for name in ("steered", "model"):
        assert_drafts(tmp_path / "target", f"{name}:path={tmp_path / 'out'}")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("--taps", "3,1"), "taps must be whole numbers joined by x"),
        (("--taps", "99"), "taps must be in 0..3"),
        (("--rank", "0"), "rank must be >= 1"),
        (("--positions", "gap"), "use plain, padding or gaps"),
        (("--divergence", "kl"), "unknown divergence"),
        (("--init-from", "there"), "No such option"),
    ],
)
def test_wrong_options_of_a_steered_drafter_get_one_sentence(monkeypatch, capsys, tmp_path, pair, wrong, message):
    assert message in " ".join(refused(monkeypatch, capsys, "train", "steer", *pair, *FEW, *wrong).split())
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("texts", ["fixed", "on_policy", "mixed:share=0.5"])
def test_one_command_trains_a_drafter_and_reports(monkeypatch, capsys, tmp_path, pair, texts: str) -> None:
    record = json.loads(done(monkeypatch, capsys, "train", "distill", *pair, *FEW, "--texts", texts, "--json"))
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
    done(monkeypatch, capsys, "train", "distill", *pair, *FEW)
    plain = weights(tmp_path / "out")
    given = [*pair, *FEW, "--capture"]
    given[given.index("--out") + 1] = str(tmp_path / "again")
    done(monkeypatch, capsys, "train", "distill", *given)
    assert (tmp_path / "again" / "training" / "states" / "manifest.json").is_file()
    for name, tensor in weights(tmp_path / "again").items():
        assert torch.allclose(tensor, plain[name], atol=1e-5), name


def test_positions_change_what_is_learnt(monkeypatch, capsys, tmp_path, pair) -> None:
    # The last 32 tokens of a text have no gap between them.
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines(length=60)))
    given = changed((*pair, *FEW), max_length=60)
    done(monkeypatch, capsys, "train", "distill", *given)
    err = refused(monkeypatch, capsys, "train", "distill", *given, "--positions", "gaps")
    assert "holds a run with positions 'plain' instead of 'gaps'" in err
    given[given.index("--out") + 1] = str(tmp_path / "gaps")
    done(monkeypatch, capsys, "train", "distill", *given, "--positions", "gaps")
    plain, gaps = weights(tmp_path / "out"), weights(tmp_path / "gaps")
    assert any(not torch.equal(tensor, gaps[name]) for name, tensor in plain.items())


def test_the_same_command_goes_on_and_other_settings_are_refused(monkeypatch, capsys, tmp_path, pair) -> None:
    done(monkeypatch, capsys, "train", "distill", *pair, *FEW)
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    done(monkeypatch, capsys, "train", "distill", *pair, *FEW)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    err = refused(monkeypatch, capsys, "train", "distill", *pair, *FEW, "--divergence", "rkl", "--seed", "3")
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
        err = refused(monkeypatch, capsys, "train", "distill", *given)
        assert message in " ".join(err.split()), (option, value, err)
    err = refused(monkeypatch, capsys, "train", "distill", *pair, *FEW, "--texts", "on_policy", "--capture")
    assert "capture needs texts that stay as they are" in " ".join(err.split())
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("command", ["distill", "steer", *TRAINED])
def test_a_model_is_never_replaced(monkeypatch, capsys, tmp_path, pair, command: str) -> None:
    given = dict(zip(pair[::2], pair[1::2], strict=True)) | {"--out": str(tmp_path / "target")}
    if command not in ("distill", "steer"):
        del given["--drafter"]
    before = {each.name: each.read_bytes() for each in (tmp_path / "target").iterdir()}
    status, _, err = run(monkeypatch, capsys, "train", command, *(each for pair in given.items() for each in pair))
    said = f"error: {tmp_path / 'target'} exists already; give a new folder with --out, or remove it\n"
    assert (status, err.endswith(said)) == (2, True), err
    assert {each.name: each.read_bytes() for each in (tmp_path / "target").iterdir()} == before


def test_wrong_names_leave_no_folder(monkeypatch, capsys, tmp_path, pair) -> None:
    given = [*pair, *FEW]
    given[given.index("--drafter") + 1] = str(tmp_path / "nowhere")
    assert run(monkeypatch, capsys, "train", "distill", *given)[0] == 2
    assert not (tmp_path / "out").exists()


def test_texts_that_are_nowhere_are_told_before_the_target_is_read(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setattr("outrider.cli.opened.opened", None)
    given = ["--data", str(tmp_path / "nowhere.jsonl"), "--out", str(tmp_path / "answers.jsonl")]
    status, _, err = run(monkeypatch, capsys, "train", "data", *given)
    assert status == 2
    assert "there is no file or folder" in err


def test_without_a_terminal_lines_say_how_far_training_is(monkeypatch, capsys, pair) -> None:
    for name in ("PATIENCE", "PERIOD", "BEAT"):
        monkeypatch.setattr(f"outrider.core.progress.{name}", 0.001)
    status, _, err = run(monkeypatch, capsys, "train", "distill", *changed((*pair, *FEW), steps=20))
    assert status == 0, err
    assert "estimating memory and hours" in err, err
    assert re.search(r"learning, \d+ s left, loss .*, block efficiency .*, \d+ of 20 steps", err), err


def test_a_training_that_only_made_the_draft_worse_says_so(monkeypatch, capsys, tmp_path, pair) -> None:
    given = [*pair, *FEW, "--learning-rate", "3", "--warmup", "0", "--divergence", "ce"]
    status, _, err = run(monkeypatch, capsys, "train", "distill", *given)
    assert status == 0, err
    assert "training did not make the drafter better: block efficiency on held-out texts was" in err, err
    assert f"{tmp_path / 'out'} holds the drafter as it was before training" in err, err
    assert "after 0 steps" not in err
    given[given.index("--out") + 1] = str(tmp_path / "last")
    out = done(monkeypatch, capsys, "train", "distill", *given, "--no-keep-best", "--json")
    assert json.loads(out)["improved"] is False


def test_training_without_a_report_library_still_ends_well(monkeypatch, capsys, tmp_path, pair) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, err = run(monkeypatch, capsys, "train", "distill", *pair, *FEW)
    assert status == 0, err
    assert "a report with plots needs matplotlib" in " ".join(err.split())
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert read(tmp_path / "out" / "training" / "log.jsonl")
