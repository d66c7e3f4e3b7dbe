"""`outrider prune` writes draft models that load, and answers wrong input in a sentence, with nothing half-written."""

import json
import re
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import outrider
from outrider.embedded import EMBEDDED_DRAFT, EMBEDDED_TARGET
from outrider.surgery.checkpoint import RECORD
from recipes.tiny import tiny_config, tiny_model
from tests.cli.runs import done, refused, run
from tests.world.tokenizers import TEXT, byte_level, letters
from tests.world.zoo import tiny


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in TEXT.splitlines()))
    return file


@pytest.fixture
def mixture(tmp_path):
    tokenizer = byte_level(280)
    config = tiny_config("mixtral", vocab_size=len(tokenizer), num_experts=6, num_local_experts=6, sliding_window=None)
    tiny_model(config).float().save_pretrained(tmp_path / "mixture")
    tokenizer.save_pretrained(tmp_path / "mixture")
    return tmp_path / "mixture"


@pytest.mark.parametrize("method", ["uncurl", "frequency", "reap"])
def test_experts_are_pruned_to_a_checkpoint_with_its_tokenizer(method, mixture, text, monkeypatch, capsys, tmp_path):
    out = tmp_path / "draft"
    printed = done(
        monkeypatch,
        capsys,
        *("prune", "experts", "--target", str(mixture), "--data", str(text), "--experts", "3"),
        *("--method", method, "--out", str(out), "--json"),
    )
    record = json.loads(printed)
    assert record["parameters"]["after"] < record["parameters"]["before"]
    assert record.items() >= json.loads((out / RECORD).read_text()).items()
    assert all(len(groups) == 3 for groups in record["origins"].values())
    model = AutoModelForCausalLM.from_pretrained(out)
    ids = AutoTokenizer.from_pretrained(out)("The sea", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert model(ids).logits.isfinite().all()


def test_a_pruned_shape_drafts_for_its_target(monkeypatch, capsys, tmp_path):
    (tmp_path / "text.txt").write_text("Once upon a time, there was a little fox who lived near a quiet river.")
    out = tmp_path / "draft"
    printed = done(
        monkeypatch,
        capsys,
        *("prune", "shape", "--data", str(tmp_path / "text.txt"), "--layers", "2", "--feed-forward", "448"),
        *("--out", str(out)),
    )
    assert "2 layers x 320, 5 heads on 1, 448 neurons" in printed
    greedy = outrider.Sampling(temperature=0)
    ways = (f"model:path={out}", "none")
    found = [
        outrider.load(drafter=way, dtype="float32").generate(["Once upon"], max_new_tokens=8, sampling=greedy)
        for way in ways
    ]
    assert found[0][0].tokens == found[1][0].tokens


def test_a_shape_is_cut_by_the_answers_that_train_data_wrote(monkeypatch, capsys, tmp_path):
    tiny("llama").float().save_pretrained(tmp_path / "target")
    letters().save_pretrained(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "once upon a time"}) + "\n")
    target, answers, out = str(tmp_path / "target"), str(tmp_path / "answers.jsonl"), tmp_path / "draft"
    asked = ("--data", str(tmp_path / "prompts.jsonl"), "--out", answers, "--max-new-tokens", "12")
    done(monkeypatch, capsys, "train", "data", "--target", target, *asked)
    given = ("--data", answers, "--layers", "1", "--out", str(out), "--json")
    printed = done(monkeypatch, capsys, "prune", "shape", "--target", target, *given)
    (answer,) = map(json.loads, (tmp_path / "answers.jsonl").read_text().splitlines())
    assert json.loads(printed)["num_tokens"] == len(answer["tokens"])
    assert AutoModelForCausalLM.from_pretrained(out).config.num_hidden_layers == 1


def test_a_shape_is_cut_by_conversations_too_and_says_what_they_are(monkeypatch, capsys, tmp_path):
    file = tmp_path / "question.jsonl"
    file.write_text(json.dumps({"question_id": 1, "turns": ["Where is the sea?", "And the fish?"]}) + "\n")
    given = ("--data", str(file), "--layers", "1", "--out", str(tmp_path / "draft"), "--json")
    status, printed, err = run(monkeypatch, capsys, "prune", "shape", *given)
    assert status == 0, err
    assert json.loads(printed)["num_tokens"] > 4
    assert "1 MT-bench question: each string of `turns` is a user turn" in err.replace("\n", " ")


def test_sizes_that_cannot_be_cut_are_refused_before_text_and_weights_are_read(monkeypatch, capsys, tmp_path):
    # There are no weights, and no text.
    tiny("gemma3").config.save_pretrained(tmp_path / "target")
    given = ("--target", str(tmp_path / "target"), "--data", "/no/such.txt", "--out", str(tmp_path / "draft"))
    status, _, err = run(monkeypatch, capsys, "prune", "shape", "--width", "16", *given)
    assert (status, "so its width must stay" in err.replace("\n", " ")) == (2, True), err


def counted(monkeypatch, capsys, folder, *records: dict[str, object]) -> tuple[dict[str, object], dict[int, int]]:
    """What `prune tokens --json` prints of some records, and the counts that it writes."""
    (folder / "data.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    out = folder / "new" / "counts.json"
    printed = done(
        monkeypatch, capsys, *("prune", "tokens", "--data", str(folder / "data.jsonl"), "--out", str(out), "--json")
    )
    assert [each.name for each in out.parent.iterdir()] == ["counts.json"]
    return json.loads(printed), {int(id): count for id, count in json.loads(out.read_text()).items()}


def test_tokens_are_counted_in_texts_prompts_and_answers_alone(monkeypatch, capsys, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
    fox, dog, cat = "the fox and the fox", "the dog", " a cat"
    report, counts = counted(
        monkeypatch, capsys, tmp_path, {"text": fox}, {"prompt": dog}, {"prompt": "who sees it?", "response": cat}
    )
    wanted = Counter(tokenizer(fox)["input_ids"]) + Counter(tokenizer(dog)["input_ids"])
    wanted += Counter(tokenizer(cat, add_special_tokens=False)["input_ids"])
    wanted[tokenizer.eos_token_id] += 2
    assert counts == wanted
    assert list(counts.values()) == sorted(counts.values(), reverse=True)
    assert (
        report.items()
        >= {"tokens": wanted.total(), "shares": {str(len(wanted)): 1.0}, "vocabulary": len(wanted)}.items()
    )


def test_the_list_of_the_printed_command_is_the_shortest_that_has_enough_of_the_text(monkeypatch, capsys, tmp_path):
    tokens = [id for id in range(5000) for _ in range(3 if id < 4090 else 1)]
    report, _ = counted(monkeypatch, capsys, tmp_path, {"tokens": tokens})
    assert report["shares"] == {"4096": (3 * 4090 + 6) / (3 * 4090 + 910), "5000": 1.0}
    assert report["vocabulary"] == 5000
    (tmp_path / "new" / "counts.json").unlink()
    report, _ = counted(monkeypatch, capsys, tmp_path, {"tokens": [*range(4090)] * 20 + [*range(4090, 5000)]})
    assert report["vocabulary"] == 4096


def test_the_printed_command_runs(text, monkeypatch, capsys, tmp_path):
    out, prompt = tmp_path / "counts.json", ("--prompt", "Once upon a time", "--max-new-tokens", "8")
    printed = done(monkeypatch, capsys, "prune", "tokens", "--data", str(text), "--out", str(out))
    spec = re.search(r"--drafter (\S+),", printed)[1].replace("DRAFT", str(EMBEDDED_DRAFT))
    given = ("--length", "fixed:2", "--temperature", "0", *prompt)
    assert done(monkeypatch, capsys, "generate", "--drafter", spec, *given) == done(
        monkeypatch, capsys, "generate", "--drafter", "none", *given[2:]
    )


def test_a_file_that_is_taken_is_not_touched(text, monkeypatch, capsys):
    before = text.read_bytes()
    err = refused(monkeypatch, capsys, "prune", "tokens", "--data", str(text), "--out", str(text))
    assert "exists already; give a new file with --out" in err
    assert text.read_bytes() == before


def test_a_plan_has_a_row_for_each_depth(monkeypatch, capsys):
    printed = done(
        monkeypatch, capsys, "prune", "plan", "--layers", "1,4", "--rounds", "2", "--context", "16", "--json"
    )
    found = json.loads(printed)
    assert {each["shape"]["layers"] for each in found["shapes"]} == {1, 4}
    assert all(abs(each["num_parameters"] / found["parameters"] - 1) <= 0.15 for each in found["shapes"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["experts", "--experts", "4"], "llama has no experts, so none can be pruned"),
        (["shape"], "nothing is to be cut; give --layers"),
        (["shape", "--layers", "13"], "layers must be in 1..12, what the target has, got 13"),
        (["shape", "--layers", "2", "--target", "/no/such"], "there is no directory /no/such"),
        (["shape", "--layers", "2", "--data", "/no/such.txt"], "there is no file or folder /no/such.txt"),
        (["shape", "--layers", "2", "--limit", "0"], "limit must be >= 1, got 0"),
        (["tokens", "--target", "/no/such"], "there is no directory /no/such"),
        (["tokens", "--data", "/no/such.txt"], "there is no file or folder /no/such.txt"),
    ],
)
def test_wrong_input_is_a_sentence_and_writes_nothing(arguments, sentence, text, monkeypatch, capsys, tmp_path):
    out = tmp_path / "new" / "draft"
    given = [*([] if "--data" in arguments else ["--data", str(text)]), "--out", str(out)]
    assert sentence in refused(monkeypatch, capsys, "prune", *arguments, *given).replace("\n", " ")
    assert not out.parent.exists()


@pytest.mark.parametrize("experts", ["7", "1"])
def test_a_count_of_experts_out_of_range_is_a_sentence(experts, mixture, text, monkeypatch, capsys, tmp_path):
    out = tmp_path / "draft"
    given = ("--target", str(mixture), "--data", str(text), "--experts", experts, "--out", str(out))
    assert "num_experts must be" in refused(monkeypatch, capsys, "prune", "experts", *given)
    assert not out.exists()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "holds no text"),
        ('{"text": ""}\n', "holds no text"),
        ('{"text": "a b"}\n{"story": "b"}\n', "line 2 of"),
        ('{"tokens": [5, "a"]}\n', "`tokens` must be a list of token ids"),
        ('{"tokens": [5, 99999]}\n', "token 99999 is not in the vocabulary of "),
        ('{"tokens": []}\n', "holds no text"),
        ("{text}\n", "is not JSON"),
    ],
)
def test_a_file_without_text_is_a_sentence(content, sentence, monkeypatch, capsys, tmp_path):
    (tmp_path / "data.jsonl").write_text(content)
    given = ("--data", str(tmp_path / "data.jsonl"), "--layers", "2", "--out", str(tmp_path / "out"))
    assert sentence in refused(monkeypatch, capsys, "prune", "shape", *given)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--layers", "one"], "--layers must be whole numbers with commas between them, got 'one'"),
        (["--layers", "1,2", "--alpha", "0.5,0.6,0.7"], "--alpha must be one number or 2"),
        (["--alpha", "2"], "alpha must be in 0..1"),
    ],
)
def test_wrong_plans_are_refused(arguments, sentence, monkeypatch, capsys):
    assert sentence in refused(monkeypatch, capsys, "prune", "plan", *arguments)


def test_a_folder_that_is_taken_is_not_touched(text, monkeypatch, capsys):
    before = sorted(EMBEDDED_TARGET.iterdir())
    given = ("--data", str(text), "--layers", "2", "--out", str(EMBEDDED_TARGET))
    assert "exists already; give a new folder with --out" in refused(monkeypatch, capsys, "prune", "shape", *given)
    assert sorted(EMBEDDED_TARGET.iterdir()) == before
