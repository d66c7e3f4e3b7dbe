"""Workloads are read as their publishers write them, and what does not parse is named by file, line and field."""

import json

import pytest

from outrider import InputError
from outrider.bench.workloads import hub
from outrider.bench.workloads.formats import PLACEHOLDER, TraceUnits, words
from outrider.bench.workloads.hub import KNOWN, HubSet, hub_set
from outrider.bench.workloads.workload import BUILT_IN, read_workload

ASKED = {"role": "user", "content": "Why?"}


def written(tmp_path, *records: object, name: str = "given.jsonl") -> str:
    place = tmp_path / name
    place.write_text("\n".join(json.dumps(each) for each in records) + "\n", encoding="utf-8")
    return str(place)


@pytest.mark.parametrize(
    ("record", "format", "id", "category", "opening", "num_turns"),
    [
        ({"question_id": 81, "category": "writing", "turns": ["Why?", "And?"]}, "Spec-Bench", "81", "writing", None, 2),
        (
            {"prompt_id": 7, "category": "math", "prompt": ["Why?", "And?", "So?"]},
            *("MT-bench prompts", "7", "math", None, 3),
        ),
        ({"question_id": "a" * 32, "category": "qa", "messages": [ASKED]}, "SPEED-Bench", "a" * 32, "qa", None, 1),
        (
            {"id": "x", "conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]},
            *("ShareGPT", "x", "conversation", None, 1),
        ),
        (
            {"task_id": "HumanEval/0", "prompt": "Why?", "test": "", "entry_point": "f"},
            *("HumanEval", "HumanEval/0", "prompt", None, 1),
        ),
        ({"task_id": 11, "text": "Why?", "code": "", "test_list": ["a"]}, "MBPP", "11", "text", None, 1),
        ({"problem": "Why?", "answer": "4", "unique_id": "u"}, "MATH", "u", "problem", None, 1),
        ({"question": "Why?", "answer": "4"}, "GSM8K", "0", "question", None, 1),
        ({"prompt": "Why?", "output_tokens": 9}, "vLLM custom", "0", "all", None, 1),
        ({"id": "s", "category": "story", "prompt": "Once"}, "Outrider", "s", "story", "Once", 1),
        ({"id": "m", "category": "two", "turns": ["Why?", "And?"]}, "Outrider", "m", "two", None, 2),
        ({"messages": [ASKED]}, "Outrider", "0", "all", None, 1),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_each_format_is_known_by_its_fields(tmp_path, record, format, id, category, opening, num_turns):
    found = read_workload(written(tmp_path, record))
    [conversation] = found.conversations
    assert (found.format, conversation.id, conversation.category) == (format, id, category)
    assert conversation.opening == (opening or [ASKED])
    assert conversation.num_turns == num_turns


def test_turns_of_ours_alternate_where_the_assistant_speaks_next(tmp_path):
    record = {"id": 1, "turns": ["A taxi.", "Where to?", "Home."]}
    [conversation] = read_workload(written(tmp_path, record)).conversations
    assert [(each["role"], each["content"]) for each in conversation.messages([])] == [
        ("user", "A taxi."),
        ("assistant", "Where to?"),
        ("user", "Home."),
    ]


def test_the_models_own_answers_stand_between_the_turns(tmp_path):
    [conversation] = read_workload(written(tmp_path, {"question_id": 1, "turns": ["Why?", "And?"]})).conversations
    assert conversation.messages([]) == [ASKED]
    assert conversation.messages(["Because."]) == [
        ASKED,
        {"role": "assistant", "content": "Because."},
        {"role": "user", "content": "And?"},
    ]


def test_system_messages_stay_and_other_answers_are_dropped(tmp_path):
    said = [{"role": "system", "content": "Be brief."}, ASKED, {"role": "assistant", "content": "No."}, ASKED]
    [conversation] = read_workload(written(tmp_path, {"question_id": 1, "messages": said})).conversations
    assert conversation.opening == said[:2]
    assert conversation.replies == ((ASKED,),)


def test_a_trace_has_times_lengths_and_shared_beginnings(tmp_path):
    records = [
        {"timestamp": 0, "input_length": 40, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 250, "input_length": 36, "output_length": 7, "hash_ids": [1, 3]},
    ]
    one, two = read_workload(written(tmp_path, *records), TraceUnits(block=16)).conversations
    assert (one.arrives, two.arrives, two.output_tokens) == (0.0, 0.25, 7)
    assert (len(one.opening), len(two.opening)) == (40, 36)
    assert one.opening[:16] == two.opening[:16] == tuple(words(1, 16))
    assert one.opening[16:32] != two.opening[16:32]
    seconds = read_workload(written(tmp_path, *records), TraceUnits(seconds=2.0)).conversations
    assert [each.arrives for each in seconds] == [0.0, 500.0]


@pytest.mark.parametrize(
    ("records", "sentence"),
    [
        ([{"question_id": 1, "turns": ["a"]}, {"question_id": 2, "turns": "a"}], r"jsonl, line 2: 'turns' must be"),
        ([{"question": "a", "answer": "b"}, {"answer": "b"}], r"line 2: 'question' is missing; it must be a text"),
        ([{"timestamp": 0, "input_length": 0, "output_length": 3}], r"line 1: 'input_length' must be a whole number"),
        ([{"id": 1, "prompt": "a"}, {"id": 1, "prompt": "b"}], r"line 2: there is a conversation '1' already"),
        ([{"id": 1, "prompt": "a", "seed": 3}], r"line 1: 'seed' is an option for all prompts"),
        ([{"colour": "red"}], r"line 1 is of no known format: it holds 'colour'; formats: SPEED-Bench"),
        ([[1, 2]], r"item 1 is no JSON object"),
        (
            [{"question_id": "x", "messages": [{"role": "user", "content": PLACEHOLDER + " FROM"}]}],
            r"line 1: 'messages' holds SPEED-Bench's placeholder",
        ),
    ],
)
def test_what_does_not_parse_is_named_by_file_line_and_field(tmp_path, records, sentence):
    with pytest.raises(InputError, match=sentence):
        read_workload(written(tmp_path, *records))


def test_a_line_that_is_no_json_is_named(tmp_path):
    place = tmp_path / "a.jsonl"
    place.write_text('{"id": 1, "prompt": "a"}\n\n{"id": 2,\n')
    with pytest.raises(InputError, match=r"a\.jsonl, line 3 is not JSON"):
        read_workload(str(place))


def test_files_of_other_kinds_hold_the_same(tmp_path):
    records = [{"question": "Why?", "answer": "4"}, {"question": "When?", "answer": "5"}]
    lines = read_workload(written(tmp_path, *records))
    (tmp_path / "all.json").write_text(json.dumps(records))
    (tmp_path / "all.csv").write_text('question,answer\n"Why?",4\n"When?",5\n')
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(records).to_parquet(tmp_path / "all.parquet")
    for name in ("all.json", "all.csv", "all.parquet"):
        found = read_workload(str(tmp_path / name))
        assert (found.format, found.conversations) == (lines.format, lines.conversations)
        assert found.sha256 != lines.sha256


def test_a_folder_is_read_whole(tmp_path):
    for i, name in enumerate(("qualitative.jsonl", "throughput_1k.jsonl")):
        written(tmp_path, {"question_id": f"q{i}", "messages": [ASKED]}, name=name)
    assert [each.id for each in read_workload(str(tmp_path)).conversations] == ["q0", "q1"]


def test_data_sets_of_the_hub_are_read_by_their_ids(monkeypatch):
    asked = []

    def records(wanted):
        asked.append(wanted)
        return [{"question": "Why?", "answer": "4"}]

    monkeypatch.setattr("outrider.bench.workloads.workload.download", records)
    assert read_workload("gsm8k").format == "GSM8K"
    assert read_workload("org/name:main:train").name == "org/name:main:train"
    assert asked == [KNOWN["gsm8k"], HubSet(id="org/name", config="main", split="train")]
    assert hub_set("org/name:train") == HubSet(id="org/name", split="train")


def test_a_data_set_that_cannot_be_reached_is_told_by_a_sentence():
    pytest.importorskip("datasets")
    with pytest.raises(InputError, match=r"^the data set outrider-no/such cannot be read: "):
        hub.download(HubSet(id="outrider-no/such"))


def test_what_is_no_workload_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"there is no workload nothing\.jsonl; give a file"):
        read_workload("nothing.jsonl")
    with pytest.raises(InputError, match="holds no workload"):
        read_workload(str(tmp_path))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InputError, match="is empty"):
        read_workload(str(tmp_path / "empty.jsonl"))
    assert len({each.category for each in read_workload(BUILT_IN).conversations}) == 4
