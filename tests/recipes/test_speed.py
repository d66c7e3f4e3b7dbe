"""The pure parts of the speed recipe: which prompts are measured, what repeats, and figures computed by hand."""

import json

import pytest

from outrider.bench.evidence import Row
from outrider.bench.workload import Question, choose, read_prompts
from recipes.speed import bare_summary, findings, summarise
from recipes.speed_runs import repeat_share

COUNTS = {"story": 32, "dialogue": 60, "math": 116, "python": 6}


def questions(counts: dict[str, int]) -> list[Question]:
    return [Question(id=f"{c}/{i}", category=c, tokens=(1, 2)) for c, n in counts.items() for i in range(n)]


def tally(chosen: list[Question]) -> dict[str, int]:
    return {c: sum(q.category == c for q in chosen) for c in COUNTS}


def test_prompts_are_balanced_and_the_others_fill_up():
    assert tally(choose(questions(COUNTS), 24)) == dict.fromkeys(COUNTS, 6)
    assert tally(choose(questions(COUNTS), 48)) == {"story": 14, "dialogue": 14, "math": 14, "python": 6}
    assert len(choose(questions(COUNTS), 1000)) == sum(COUNTS.values())


def test_prompts_are_distinct_and_the_same_every_time():
    first = choose(questions(COUNTS), 48)
    assert len({q.id for q in first}) == 48
    assert choose(questions(COUNTS), 48) == first
    assert choose(questions(COUNTS), 48, seed=1) != first


def test_turns_become_messages(tmp_path):
    lines = [
        {"id": "a", "category": "dialogue", "turns": ["Hello.", "Hello!", "A table for two."]},
        {"id": "b", "category": "story", "prompt": "Once"},
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (_, _, chat), (id, category, text) = read_prompts(tmp_path / "prompts.jsonl")
    assert [message["role"] for message in chat] == ["user", "assistant", "user"]
    assert chat[2]["content"] == "A table for two."
    assert (id, category, text) == ("b", "story", "Once")


@pytest.mark.parametrize(
    ("tokens", "share"),
    [
        (range(100), 0),
        ([7] * 17, 9 / 10),
        ([*range(8), *range(8)], 1 / 9),
        (range(7), 0),
        ([], 0),
    ],
)
def test_share_of_ngrams_that_stood_before(tokens, share):
    assert repeat_share(list(tokens)) == pytest.approx(share)


def made(name: str, prompt: str, seconds: list[float], steps: int, repeat: float = 0.0, **more: object) -> list[Row]:
    return [
        {
            "method": name,
            "temperature": 0.0,
            "prompt": prompt,
            "category": prompt[:1],
            "round": i,
            "tokens": 100,
            "seconds": s,
            "steps": steps,
            "drafted": 0,
            "accepted": 0,
            "profile": {},
            "repeat_share": repeat,
            "digest": "same",
            **more,
        }
        for i, s in enumerate(seconds)
    ]


def hand_made() -> list[Row]:
    profile = {"target": 0.25, "drafter": 0.125, "rest": 0.125}
    drafts = {"drafted": 200, "accepted": 60, "profile": profile}
    return [
        *made("plain pad_to=1", "a", [1.0, 9.0, 1.0], 100),
        *made("plain pad_to=1", "b", [3.0, 3.0, 3.0], 100, repeat=0.5),
        *made("plain pad_to=2", "a", [2.0, 2.0, 2.0], 100),
        *made("plain pad_to=2", "b", [4.0, 4.0, 4.0], 100),
        *made("speculative", "a", [0.5, 0.5, 7.0], 50, **drafts),
        *made("speculative", "b", [0.5, 0.5, 0.5], 25, **drafts),
    ]


def test_summary_is_the_one_computed_by_hand():
    summary = summarise(hand_made())
    assert summary["plain"] == {"0": "plain pad_to=1"}
    assert summary["repeating_prompts"] == ["b"]
    entries = {e["method"]: e for e in summary["methods"]}
    ours = entries["speculative"]
    assert ours["tokens_per_second"] == pytest.approx(200 / 1.0)
    assert ours["all"]["speedup"] == pytest.approx(4.0)
    assert 2 <= ours["all"]["low"] <= 4 <= ours["all"]["high"] <= 6
    assert ours["without_repeating"]["speedup"] == pytest.approx(2.0)
    assert ours["only_repeating"]["speedup"] == pytest.approx(6.0)
    assert ours["by_category"]["b"]["speedup"] == pytest.approx(6.0)
    assert ours["block_efficiency"] == pytest.approx(600 / 225)
    assert ours["acceptance"] == pytest.approx(0.3)
    assert ours["profile"]["target"] == pytest.approx(6 * 0.25 / 9.5)
    assert ours["same_as_plain_pad_to_2"] == 1
    assert entries["plain pad_to=1"]["all"] == {"speedup": 1, "low": 1, "high": 1, "num_prompts": 2}
    assert entries["plain pad_to=2"]["all"]["speedup"] == pytest.approx(4 / 6)


def test_rounds_of_unequal_length_count_by_seconds_per_token():
    rows = hand_made()
    for row in rows:
        if row["method"] == "speculative" and row["round"] == 1:
            row["tokens"], row["seconds"] = 200, row["seconds"] * 2
    entry = next(e for e in summarise(rows)["methods"] if e["method"] == "speculative")
    assert entry["all"]["speedup"] == pytest.approx(4.0)


def test_efficiency_divides_by_what_bare_forwards_allow():
    summary = summarise(hand_made())
    bare = {"target 1": [1.0, 1.0], "target 5": [1.2, 1.2], "draft 1": [0.1, 0.1]}
    found = bare_summary(bare, bare, {0.0: 4}, summary["methods"])["by_temperature"]["0"]
    assert (found["v"], found["c"]) == pytest.approx((1.2, 0.1))
    assert found["allowed_speedup"] == pytest.approx(600 / 225 / 1.6)
    assert found["efficiency"] == pytest.approx(4.0 / (600 / 225 / 1.6))


def test_table_has_a_line_per_configuration():
    summary = summarise(hand_made())
    bare = {"target 1": [1.0], "target 5": [1.2], "draft 1": [0.1]}
    summary["bare"] = bare_summary(bare, bare, {0.0: 4}, summary["methods"])
    summary["categories"] = {"a": 1, "b": 1}
    summary["pilot"] = {"num_prompts": 1, "tokens_per_second": {"0": {"4": 9.0}}, "lengths": {"0": 4}}
    summary |= {"rounds": 3, "max_new_tokens": 100, "dtype": "bfloat16"}
    made = {
        "commit": "abc",
        "uncommitted_changes": False,
        "versions": {"torch": "1", "transformers": "2", "outrider": "3"},
        "cpu": "a CPU",
        "threads": 2,
        "date": "today",
    }
    assert "| speculative | 0 | 200.0 |" in findings(summary).markdown("speed", made)
