"""A draft model that learns from a stream is judged by the weights that each request was drafted with."""

import json
from pathlib import Path

import pytest
import torch

from outrider.core.types import InputError
from outrider.embedded import EMBEDDED_TARGET
from outrider.lm.hf.open import open_config, open_tokenizer
from recipes import online
from recipes.trained import embedded_target

TEXTS = {
    "story": "Once upon a time, {n} foxes lived near a quiet river and found {n} red kites. They went to the park, and "
    "a boy named Tim came to play with them. He was very happy that day.",
    "python": "def count_{n}(names):\n    total = {n}\n    for name in names:\n        total += len(name)\n    return "
    "total\n\n\nclass Counter:\n    pass\n",
    "math": "<|user|>Tim has {n} apples, and he buys 4 more apples in each of 5 weeks. How many apples does Tim have "
    "in the end, if he eats 3 of them?\n<|assistant|>",
}


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "text.jsonl"
    lines = [{"domain": name, "text": text.format(n=n)} for n in range(11, 20) for name, text in TEXTS.items()]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def served(prompts, temperature, **changes):
    waves = []
    options = {"max_new_tokens": 12, "interval": 2, "learning_rate": 1e-3, "margin": 1.0} | changes
    stream = online.Stream(data=Path("none"), **options)
    target = embedded_target()
    row = stream.served({"story": prompts}, online.DRAFT, temperature, 0, target, lambda: waves.append(1))
    assert len(waves) == len(prompts) // 2
    return row


@pytest.fixture(scope="module")
def prompts():
    tokenizer = open_tokenizer(str(EMBEDDED_TARGET))
    return [tokenizer(TEXTS["story"].format(n=n))["input_ids"][:20] for n in range(11, 15)]


def test_the_quick_form_compares_both_draft_models_on_every_request(data, tmp_path):
    online.main(data=data, out=tmp_path / "out", **online.QUICK)
    runs = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert sorted(run["temperature"] for run in runs) == [0, 1]
    requests, interval = online.QUICK["requests"], online.QUICK["interval"]
    for run in runs:
        assert [row["category"] for row in run["each"]] == [name for name in TEXTS for _ in range(requests)]
        assert len({row["prompt"] for row in run["each"]}) == 3 * requests
        assert run["rounds"] == 3 * requests // interval
        # Nothing is learnt before the first requests, and something before the last ones.
        assert all(row["frozen"] == row["learning"] for row in run["each"][:interval])
        assert any(row["frozen"] != row["learning"] for row in run["each"][-interval:])
    claims = json.loads((tmp_path / "out" / "claims.json").read_text())
    assert len(claims) == 2 * 3 * 2
    assert {claim["paper_value"] for claim in claims} == {online.PUBLISHED}
    assert "| python |" in (tmp_path / "out" / "table.md").read_text()


def test_a_draft_model_with_a_learning_rate_of_0_is_the_frozen_one(prompts):
    for row in served(prompts, 1, learning_rate=0.0)["each"]:
        assert row["learning"] == pytest.approx(row["frozen"])


def test_a_request_that_comes_again_and_again_is_learnt(prompts):
    each = served(prompts[:1] * 16, 0, learning_rate=3e-3)["each"]
    # Greedy outputs do not depend on the draft model, so the frozen one stays where it is.
    assert all(row["frozen"] == each[0]["frozen"] for row in each)
    assert each[-1]["learning"]["first"] > each[-1]["frozen"]["first"]
    assert each[-1]["learning"]["steps"] < each[-1]["frozen"]["steps"]


def test_expected_greedy_tokens_per_step_are_those_that_the_engine_counts(prompts):
    # Whole steps only: the last ones are cut by the output's end, and are not judged.
    each = served(prompts, 0, max_new_tokens=40)["each"]
    judged = sum(row["learning"]["tokens"] for row in each) / sum(row["learning"]["steps"] for row in each)
    counted = sum(40 for _ in each) / sum(40 - row["accepted"] for row in each)
    assert judged == pytest.approx(counted, rel=0.15)


def test_parts_of_a_domain_sum_up_to_the_domain():
    dice = torch.Generator().manual_seed(0)
    rows = []
    for seed in range(2):
        for place, number in enumerate(torch.randperm(8, generator=dice).tolist()):
            counts = {"tokens": 3.0 + number, "steps": 2.0, "first": 1.0, "places": 4}
            row = {"prompt": f"story {number}", "category": "story", "place": place, "temperature": 0, "seed": seed}
            rows.append(row | {"frozen": counts, "learning": counts | {"first": 1.0 + place}})
    whole = online.sums_of(rows, 0, "story")
    parts = [online.sums_of(rows, 0, "story", part) for part in range(online.PARTS)]
    for field in ("tokens", "steps", "first", "places"):
        assert sum(part.get("learning", field)[0] for part in parts) == pytest.approx(whole.get("learning", field)[0])
    assert [online.rise(part).value for part in parts] == pytest.approx([0.125, 0.625, 1.125, 1.625])


def test_too_few_texts_of_a_domain_is_a_sentence(data, tmp_path):
    with pytest.raises(InputError, match=r"0 different openings of 32 tokens of the domain 'poem', and 4 are needed"):
        online.main(data=data, out=tmp_path / "out", domains="story,poem", **online.QUICK)
    assert not (tmp_path / "out").exists()


def test_a_draft_model_can_begin_without_the_domains_of_the_stream(data, tmp_path):
    with data.open("a") as file:
        file.writelines(json.dumps({"domain": "qa", "text": f"Why did {n} foxes go home?"}) + "\n" for n in range(4))
    tokenizer = open_tokenizer(str(EMBEDDED_TARGET))
    place = online.outsider(tmp_path / "draft", data, ["story", "python", "math"], 1, tokenizer)
    config = open_config(str(place))
    assert config.hidden_size == online.SHAPE["hidden_size"]
    with pytest.raises(InputError, match="has no text of another domain"):
        online.outsider(tmp_path / "other", data, [*TEXTS, "qa"], 1, tokenizer)
    with pytest.raises(InputError, match="name a folder for it with --work"):
        online.main(data=data, text_steps=1, **online.QUICK)
