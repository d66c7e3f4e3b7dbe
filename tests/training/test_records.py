"""Every kind of source gives the same documents, and what is wrong with one is said in a sentence."""

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from outrider.core.types import InputError
from outrider.training.data.documents import Corpus
from outrider.training.data.records import read_documents
from outrider.training.data.sources import PIECE, DatasetPart
from tests.world.tokenizers import byte_level

TOKENIZER = byte_level(300)
TOKENIZER.chat_template = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
END = TOKENIZER.eos_token_id
STORIES = [{"text": "The sea was calm.", "domain": "story"}, {"text": "A fish sang.", "domain": "story"}]


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def texts(corpus: Corpus) -> list[tuple[str, str]]:
    """Each document as the text of its prompt and the text to learn."""
    return [(TOKENIZER.decode(d.prompt), TOKENIZER.decode(d.tokens[d.start :])) for d in corpus]


def test_all_kinds_of_source_give_the_same_documents(tmp_path: Path) -> None:
    plain = lines(tmp_path / "a.jsonl", STORIES)
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    lines(folder / "1.jsonl", STORIES[:1])
    lines(folder / "deep" / "2.jsonl", STORIES[1:])
    (folder / "deep" / "picture.png").write_bytes(b"\xff\xd8")
    (tmp_path / "c.json").write_text(json.dumps(STORIES))
    rows = datasets.Dataset.from_list(STORIES)
    rows.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": rows.select([0]), "test": rows}).save_to_disk(str(tmp_path / "splits"))
    rows.to_parquet(str(tmp_path / "d.parquet"))

    def read(source: str | Path | list[str | Path], split: str = "train") -> list[Any]:
        corpus = read_documents(source, TOKENIZER, part=DatasetPart(split=split))
        return [(document.tokens.tolist(), document.start, document.domain) for document in corpus]

    wanted = [([*TOKENIZER(row["text"])["input_ids"], END], 0, "story") for row in STORIES]
    for source in (plain, packed, folder, "c.json", "saved", "d.parquet"):
        assert read(tmp_path / source) == wanted, source
    assert read(tmp_path / "splits", split="test") == wanted
    assert read(tmp_path / "splits") == wanted[:1]
    assert read([plain, str(packed)]) == wanted * 2


def test_a_prompt_is_not_learnt_and_its_answer_is(tmp_path: Path) -> None:
    rows = [
        {"prompt": "Who sang?", "response": " A fish."},
        {"prompt": "Who sang?", "text": " A man."},
        {"tokens": [5, 6, 7, 8], "start": 2},
        {"tokens": [5, 6, 7, 8]},
    ]
    corpus = read_documents(lines(tmp_path / "a.jsonl", rows), TOKENIZER)
    assert texts(corpus)[:2] == [("Who sang?", " A fish.<|end|>"), ("Who sang?", " A man.<|end|>")]
    assert [(d.tokens.tolist(), d.start) for d in corpus[2:]] == [([5, 6, 7, 8], 2), ([5, 6, 7, 8], 0)]


def test_fields_may_have_other_names(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", [{"question": "Who sang?", "answer": " A fish."}])
    part = DatasetPart(columns={"prompt": "question", "response": "answer"})
    assert texts(read_documents(file, TOKENIZER, part=part)) == [("Who sang?", " A fish.<|end|>")]


def test_each_answer_of_a_conversation_is_a_document(tmp_path: Path) -> None:
    said = ["Hello", "Good day.", "Fish?", "No."]
    names = ["user", "assistant"] * 2
    rows = [
        {"turns": said},
        {"messages": [{"role": role, "content": text} for role, text in zip(names, said, strict=True)]},
        {"conversations": [{"from": ("human", "gpt")[n % 2], "value": text} for n, text in enumerate(said)]},
        {"turns": said[:3]},
    ]
    corpus = read_documents(lines(tmp_path / "a.jsonl", rows), TOKENIZER)
    one = ("[user]Hello<|end|>\n[assistant]", "Good day.<|end|>")
    two = ("[user]Hello<|end|>\n[assistant]Good day.<|end|>\n[user]Fish?<|end|>\n[assistant]", "No.<|end|>")
    assert texts(corpus) == [one, two] * 3 + [one]
    prompts = read_documents(lines(tmp_path / "a.jsonl", rows[3:]), TOKENIZER, prompts=True)
    assert texts(prompts) == [one, (two[0], "")]


def test_a_template_that_writes_past_answers_otherwise_gives_the_answer_itself(tmp_path: Path) -> None:
    tokenizer = byte_level(300)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]<think>{% endif %}"
    )
    file = lines(tmp_path / "a.jsonl", [{"turns": ["Hello", "Good day."]}])
    [document] = read_documents(file, tokenizer)
    assert tokenizer.decode(document.prompt) == "[user]Hello[assistant]<think>"
    assert tokenizer.decode(document.tokens[document.start :]) == "Good day.<|end|>"


def test_a_long_text_file_becomes_documents_of_whole_lines(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    line = "The old man went down to the sea.\n"
    file.write_text(line * (2 * PIECE // len(line)))
    corpus = read_documents(file, TOKENIZER)
    assert len(corpus) == 2
    assert "".join(text for _, text in texts(corpus)) == file.read_text() + "<|end|>"
    assert [int(document.tokens[-1]) == END for document in corpus] == [False, True]


def test_documents_are_cut_limited_and_counted(tmp_path: Path) -> None:
    rows = [{"text": "fish " * 30}, {"text": "A"}, {"text": ""}, {"prompt": "fish " * 30, "text": "A"}]
    file = lines(tmp_path / "a.jsonl", rows)
    corpus = read_documents(file, TOKENIZER, max_tokens=10)
    assert [len(document.tokens) for document in corpus] == [10, 2]
    assert str(corpus) == (
        "2 documents with 12 tokens; 2 were longer than 10 tokens and were cut; 2 had no token to learn and were left "
        "out"
    )
    assert len(read_documents(file, TOKENIZER, limit=1)) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "the corpus is empty; .*a.jsonl must hold `text`; `prompt` with"),
        ('{"text": ""}\n', "the corpus is empty: none of its 1 documents has a token to learn"),
        ('{"text": "a fish"}\n{"text": "a f', "line 2 of .*a.jsonl is not JSON"),
        ("[1, 2]\n", "line 1 of .*a.jsonl is not a JSON object, but list"),
        ('\n{"story": "a fish", "id": 3}\n', "line 2 of .*: no known field; it has story, id, and a record needs"),
        ("{}\n", "no known field; it has none"),
        ('{"text": 3}\n', "line 1 of .*: text must be a text, got 3"),
        ('{"prompt": "a"}\n', "line 1 of .* has a prompt and no answer; let the target answer it with"),
        ('{"turns": ["a"]}\n', "line 1 of .* has a prompt and no answer"),
        ('{"turns": []}\n', "'turns' must be a conversation, a list of texts or of messages, got"),
        ('{"messages": [{"role": "user"}]}\n', "a message of 'messages' needs role and content"),
        ('{"tokens": [1, "b"]}\n', "`tokens` must be a list of token ids"),
        ('{"tokens": [1, 300]}\n', "token 300 is not in the vocabulary of 300 tokens"),
        ('{"tokens": [1, 2], "start": 3}\n', r"start must be in 0\.\.2, the number of tokens, got 3"),
        (b'{"text": "\xff"}\n', "line 1 of .* is not UTF-8 text"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, content: str | bytes, words: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=words):
        read_documents(file, TOKENIZER, vocab_size=300)


def test_a_source_that_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    half = tmp_path / "half.jsonl.gz"
    half.write_bytes(gzip.compress(b'{"text": "a fish"}\n' * 100)[:-9])
    (tmp_path / "empty").mkdir()
    for source, words in [
        (tmp_path / "nothing", "there is no file or folder .*nothing; give text"),
        (tmp_path / "empty", "there is no text in the folder .*empty; files must end in"),
        (half, "half.jsonl.gz is not a complete gzip file"),
        ("data.jsonl", r"there is no file or folder data\.jsonl"),
        ("nobody/nothing", "there is no file or folder nobody/nothing, and it cannot be loaded from the Hub: "),
    ]:
        with pytest.raises(InputError, match=words):
            read_documents(source, TOKENIZER)
    datasets.DatasetDict({"test": datasets.Dataset.from_list(STORIES)}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(InputError, match="has no split 'train'; it has test"):
        read_documents(tmp_path / "splits", TOKENIZER)
    with pytest.raises(InputError, match="there is no tokenizer"):
        read_documents(lines(tmp_path / "a.jsonl", STORIES), None)
    assert len(read_documents(lines(tmp_path / "b.jsonl", [{"tokens": [1, 2]}]), None)) == 1
