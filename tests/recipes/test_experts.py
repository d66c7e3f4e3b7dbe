"""Pruned targets draft for the target, and are compared with fresh models of equal size."""

import json

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from outrider.core.types import InputError
from outrider.embedded import EMBEDDED_DRAFT, EMBEDDED_TARGET
from outrider.lm.hf.open import open_tokenizer
from outrider.surgery.checkpoint import write
from outrider.surgery.experts import METHODS
from recipes import experts
from recipes.trained import of

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


@pytest.fixture
def target(tmp_path):
    tokenizer = open_tokenizer(str(EMBEDDED_TARGET))
    torch.manual_seed(0)
    config = MixtralConfig(vocab_size=len(tokenizer), max_position_embeddings=128, eos_token_id=0, **SHAPE)
    write(MixtralForCausalLM(config), tokenizer, tmp_path / "target", {})
    return tmp_path / "target"


@pytest.fixture
def files(tmp_path):
    text = "Once upon a time, {n} foxes lived near a quiet river and found {n} red kites. They went to the park, and a "
    text += "boy named Tim came to play with them. He was very happy, and they all went home in the evening."
    data, prompts = tmp_path / "text.jsonl", tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"text": text.format(n=n)}) + "\n" for n in range(12)))
    asked = [{"id": str(n), "category": "story", "prompt": f"One day, {n} boys"} for n in range(4)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in asked))
    return {"data": data, "prompts": prompts, "work": tmp_path / "work"}


def test_the_quick_form_judges_every_drafter(target, files, tmp_path):
    experts.main(target=str(target), out=tmp_path / "out", **files, **experts.QUICK)
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    by_name = {row["method"]: row for row in rows}
    pruned = {experts.untrained(method, 4) for method in METHODS}
    trained = {experts.distilled(method, 4) for method in (*METHODS, experts.FRESH)}
    assert by_name.keys() == pruned | trained
    assert {name for name, row in by_name.items() if row.get("steps") == 2} == trained
    for row in rows:
        assert {each["prompt"] for each in row["each"]} == {"0", "1", "2", "3"}
        assert all(1 <= each[f"tokens_{of(1)}"] / each[f"steps_{of(1)}"] <= 6 for each in row["each"])
    # A fresh model knows nothing of the target.
    first = {name: sum(each["first_1"] for each in row["each"]) for name, row in by_name.items()}
    assert first[experts.distilled("uncurl", 4)] > first[experts.distilled(experts.FRESH, 4)]
    claims = json.loads((tmp_path / "out" / "claims.json").read_text())
    assert len(claims) == 2 * 8
    assert {claim["url"] for claim in claims} == {experts.UNCURL.url, experts.REAP.url}
    table = (tmp_path / "out" / "table.md").read_text()
    assert all(f"| {name} |" in table for name in by_name)


def test_fresh_models_have_the_size_of_pruned_ones_and_differ_by_seed(target):
    model = experts.opened(str(target), [4])
    config = experts.prune_experts(model, [[1, 2, 3]], 4).model.config
    one, other = (experts.fresh(config, type(model), seed) for seed in range(2))
    pruned = experts.prune_experts(model, [[1, 2, 3]], 4).model
    assert {name: w.shape for name, w in one.state_dict().items()} == {
        name: w.shape for name, w in pruned.state_dict().items()
    }
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert torch.equal(one.lm_head.weight, experts.fresh(config, type(model), 0).lm_head.weight)


@pytest.mark.parametrize(
    ("place", "count", "sentence"),
    [(None, "9", "num_experts must be <= 8"), (None, "1", "num_experts must be >= 2"), (EMBEDDED_DRAFT, "4", "has no")],
)
def test_experts_that_cannot_be_kept_are_a_sentence_before_anything_is_written(
    place, count, sentence, target, files, tmp_path
):
    with pytest.raises(InputError, match=sentence):
        experts.main(target=str(place or target), out=tmp_path / "out", **files, **experts.QUICK | {"experts": count})
    assert not files["work"].exists()
    assert not (tmp_path / "out").exists()
