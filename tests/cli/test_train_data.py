"""outrider train data: from a file of prompts to a file that a drafter can be trained on."""

import json
from pathlib import Path

from outrider.training.data.records import read_documents
from tests.cli.runs import done, refused

SHORT = ("--max-new-tokens", "4", "--temperature", "0")


def test_a_file_of_prompts_becomes_a_corpus_and_a_second_run_adds_nothing(monkeypatch, capsys, tmp_path: Path) -> None:
    source, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    rows = [{"question": "Once upon a time"}, {"turns": ["I need a taxi."]}, {"text": "The sea was calm. " * 9}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ("train", "data", "--data", str(source), "--out", str(out), *SHORT, "--prompt-tokens", "6", "--json")
    arguments += ("--column", "prompt=question")
    printed = done(monkeypatch, capsys, *arguments)
    assert {name: json.loads(printed)[name] for name in ("prompts", "kept", "answers", "tokens", "failed")} == {
        "prompts": 3,
        "kept": 0,
        "answers": 3,
        "tokens": 12,
        "failed": 0,
    }
    corpus = read_documents(out, None)
    assert [len(document.tokens) - document.start for document in corpus] == [4, 4, 4]
    assert corpus[2].start == 6
    before = out.read_bytes()
    assert json.loads(done(monkeypatch, capsys, *arguments))["kept"] == 3
    assert out.read_bytes() == before
    assert "was made with seed=0 and not 3" in refused(monkeypatch, capsys, *arguments, "--seed", "3")


def test_wrong_input_is_one_sentence(monkeypatch, capsys, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    out = str(tmp_path / "out.jsonl")
    for arguments, words in [
        (("--data", str(empty), "--out", out), "the corpus is empty"),
        (("--data", str(tmp_path / "none"), "--out", out), "there is no file or folder"),
        (("--data", str(empty), "--out", out, "--prompt-tokens", "0"), "prompt_tokens must be >= 1, got 0"),
        (("--data", str(empty), "--out", out, "--column", "prompt"), "--column must be a pair such as prompt=question"),
    ]:
        err = refused(monkeypatch, capsys, "train", "data", *arguments)
        assert err.startswith("error: ")
        assert words in err.replace("\n", " ")
    assert not Path(out).exists()
