"""A conversation in a record means the same wherever it is read."""

import json

import pytest

from outrider.bench.workloads.workload import read_workload
from outrider.cli.prompts import read_file
from outrider.core.conversations import conversation_of
from outrider.core.inputs import InputError
from outrider.training.data.records import read_documents
from tests.world.tokenizers import byte_level

USER, ASSISTANT, SYSTEM = ("user", "assistant", "system")
TOKENIZER = byte_level(300)
TOKENIZER.chat_template = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
QUESTION = {"question_id": 81, "category": "writing", "turns": ["Why?", "And then?"]}


def roles(*said: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(said[::2], said[1::2], strict=True)]


SHAPES = [
    (QUESTION, roles(USER, "Why?"), 1),
    ({"question_id": 1, "turns": ["Why?", "And?", "So?"]}, roles(USER, "Why?"), 2),
    ({"prompt_id": 1, "prompt": ["Why?", "And?"]}, roles(USER, "Why?"), 1),
    ({"id": "mt_bench/81", "category": "writing", "turns": ["Why?", "And?"]}, roles(USER, "Why?"), 1),
    ({"question_id": "a", "messages": roles(SYSTEM, "Short.", USER, "Why?", USER, "And?")}, None, 1),
    ({"id": "a", "category": "talk", "turns": ["Hi", "Hello", "Why?"]}, None, 0),
    ({"turns": ["Hi", "Hello", "Why?"]}, roles(USER, "Hi", ASSISTANT, "Hello", USER, "Why?"), 0),
    ({"id": 1, "messages": roles(SYSTEM, "Short.", USER, "Why?")}, roles(SYSTEM, "Short.", USER, "Why?"), 0),
]


@pytest.mark.parametrize(("record", "prompt", "num_later"), SHAPES)
def test_bench_generate_and_training_ask_the_same(tmp_path, record, prompt, num_later):
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(record) + "\n")
    found = conversation_of(record)
    assert len(found.later) == num_later
    assert prompt is None or list(found.messages) == prompt
    [played] = read_workload(str(file)).conversations
    assert list(played.opening) == list(found.messages)
    assert played.replies == tuple((each,) for each in found.later)
    assert read_file(file) == [list(found.messages)]
    *_, document = read_documents(file, TOKENIZER, prompts=True)
    wanted = TOKENIZER.apply_chat_template(list(found.messages), tokenize=False, add_generation_prompt=True)
    assert TOKENIZER.decode(document.prompt) == wanted


def test_questions_never_become_documents_whose_answers_are_questions(tmp_path):
    file = tmp_path / "question.jsonl"
    file.write_text(json.dumps(QUESTION) + "\n")
    with pytest.raises(
        InputError, match=r"\(MT-bench question: each string of `turns` is a user turn\) has a prompt and"
    ):
        read_documents(file, TOKENIZER)


def test_what_a_file_was_taken_for_is_said_with_its_count(tmp_path, capsys):
    file = tmp_path / "question.jsonl"
    file.write_text("".join(json.dumps(QUESTION | {"question_id": n}) + "\n" for n in range(80)))
    said = "80 MT-bench questions: each string of `turns` is a user turn"
    assert read_workload(str(file)).taken_for == said
    assert read_documents(file, TOKENIZER, prompts=True).taken_for.startswith(said)
    read_file(file)
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count(said)) == ("", 1)


def test_one_string_is_a_user_turn(tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"turns": ["Why?"]}) + "\n")
    assert read_workload(str(file)).taken_for == "1 conversation: the string of `turns` is a user turn"
