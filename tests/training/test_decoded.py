"""Real decoding while a drafter learns."""

from pathlib import Path

import pytest

from outrider.core.types import InputError
from outrider.learning.divergences import divergence
from outrider.training.data.batches import Batches
from outrider.training.decoded import DecodedPrompts
from outrider.training.distill import Distilled
from outrider.training.loop.journal import read
from outrider.training.loop.settings import TrainSettings
from outrider.training.loop.steps import train
from outrider.training.loop.watch import Evaluation
from tests.world.learners import documents, head_learner
from tests.world.zoo import tiny


def test_the_target_as_its_own_drafter_emits_whole_drafts_in_every_step() -> None:
    target = tiny("llama")
    learner = Distilled(tiny("llama"), target, loss=divergence("fkl"))
    found = DecodedPrompts(
        target, None, documents(), drafter="model", count=3, depth=3, temperature=0, max_new_tokens=16, max_length=64
    )
    assert [len(prompt) for prompt in found.prompts] == [each.start for each in documents()[:3]]
    assert found.block_efficiency(learner) == 4


def test_what_is_decoded_while_a_head_learns_is_in_the_log(tmp_path: Path) -> None:
    target = tiny("llama").float().requires_grad_(False)
    decode = DecodedPrompts(
        target, None, documents(), drafter="medusa", count=2, depth=2, temperature=1, max_new_tokens=8, max_length=64
    ).block_efficiency
    settings = TrainSettings(steps=2, batch_size=2, max_length=24, watch_every=1, save_every=2, log_every=1)
    batches = Batches(documents(), batch_size=2, max_length=24, seed=0)
    done = train(
        head_learner("medusa", target, depth=2),
        batches,
        settings,
        tmp_path,
        Evaluation(documents(), depth=2, decode=decode),
    )
    logged = [line["block_efficiency_decoded"] for line in read(done.log) if line["kind"] == "watch"]
    assert len(logged) == 3
    assert all(1 <= each <= 3 for each in logged), logged


def test_outputs_that_are_longer_than_texts_are_refused() -> None:
    with pytest.raises(InputError, match="give a larger --max-length, or leave out --watch-prompts"):
        DecodedPrompts(
            tiny("llama"), None, documents(), drafter="model", count=1, depth=1, temperature=0, max_length=64
        )
