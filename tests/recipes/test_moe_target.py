"""The small mixture-of-experts target is trained, goes on after an interrupt, and can be pruned."""

import json

import pytest
import torch

from outrider.core.types import InputError
from outrider.lm.hf.open import open_model, open_tokenizer
from outrider.surgery.experts import prune_experts
from recipes import moe_target


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "text.jsonl"
    lines = [
        {"text": f"Once upon a time, {n} foxes lived near a quiet river and found {n + 1} kites."} for n in range(20)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def weights(folder):
    return open_model(str(folder / "target"), device="cpu").state_dict()


def test_the_quick_form_writes_a_target_whose_experts_can_be_pruned(data, tmp_path):
    moe_target.main(data=data, out=tmp_path / "out", **moe_target.QUICK)
    target = open_model(str(tmp_path / "out" / "target"), device="cpu")
    assert 8e6 < sum(p.numel() for p in target.parameters()) < 15e6
    texts = open_tokenizer(str(tmp_path / "out" / "target"))(["Once upon a time"])["input_ids"]
    pruned = prune_experts(target, texts, 4).model
    assert pruned.config.num_local_experts == 4
    with torch.no_grad():
        assert pruned(torch.tensor(texts)).logits.isfinite().all()
    with pytest.raises(InputError, match="exists already"):
        moe_target.main(data=data, out=tmp_path / "out", **moe_target.QUICK)


def test_a_run_that_goes_on_ends_with_the_weights_of_one_in_one_go(data, tmp_path):
    moe_target.main(data=data, out=tmp_path / "whole", **moe_target.QUICK)
    whole = weights(tmp_path / "whole")
    checkpoint = tmp_path / "cut" / moe_target.CHECKPOINT
    checkpoint.parent.mkdir()
    # A run that was ended after its first checkpoint.
    half = moe_target.QUICK | {"save_every": 3}
    moe_target.main(data=data, out=tmp_path / "cut", **half)
    assert torch.load(checkpoint, weights_only=True)["step"] == 3
    (tmp_path / "cut" / "target").rename(tmp_path / "first")
    moe_target.main(data=data, out=tmp_path / "cut", **half)
    resumed = weights(tmp_path / "cut")
    assert all(torch.equal(resumed[name], weight) for name, weight in whole.items())


def test_a_checkpoint_of_other_settings_is_refused(data, tmp_path):
    moe_target.main(data=data, out=tmp_path / "out", **moe_target.QUICK)
    (tmp_path / "out" / "target").rename(tmp_path / "moved")
    with pytest.raises(InputError, match="is of a run with other settings"):
        moe_target.main(data=data, out=tmp_path / "out", **moe_target.QUICK | {"rows": 3})


def test_too_little_text_is_a_sentence(tmp_path):
    (tmp_path / "short.txt").write_text("Once.")
    with pytest.raises(InputError, match="give more text or --length"):
        moe_target.main(data=tmp_path / "short.txt", out=tmp_path / "out", **moe_target.QUICK)
