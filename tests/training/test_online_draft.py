"""The weights of a draft model that learns: what a step of the optimizer does, and what drafts afterwards."""

import pytest
import torch

from outrider.drafters.model import ModelDrafter
from outrider.learning.divergences import divergence
from outrider.lm.open import as_lm
from outrider.lm.protocol import Segment
from outrider.training.online.corrections import Lesson
from outrider.training.online.weights import OnlineDraft
from tests.world.recurrent_zoo import tiny_recurrent
from tests.world.zoo import VOCAB, tiny

KINDS = ("llama", "qwen3", "gemma3", "gpt2", "bloom", "mixtral", "qwen3_next")


def online(kind: str, learning_rate: float = 3e-3, max_length: int = 64) -> OnlineDraft:
    model = tiny_recurrent(kind) if kind == "qwen3_next" else tiny(kind)
    drafter = ModelDrafter(lm=as_lm(model, max_slots=2))
    return OnlineDraft(
        drafter, divergence=divergence("fkl"), learning_rate=learning_rate, clip=1.0, max_length=max_length
    )


def lesson(places: list[int], length: int = 12, seed: int = 1) -> Lesson:
    """A text with rows of another model at some places."""
    dice = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCAB, (length,), generator=dice).tolist()
    rows = 3 * torch.randn(len(places), VOCAB, generator=dice, dtype=torch.float64)
    return Lesson(tokens=tokens, places=places, logits=list(rows))


def guesses(draft: OnlineDraft, text: list[int]) -> torch.Tensor:
    """What the drafter of new requests says at each position of a text."""
    lm = draft.drafter.lm
    slot = lm.open()
    logits = lm.extend([Segment(slot=slot, tokens=torch.tensor(text))]).logits
    lm.release(slot)
    return logits


@pytest.mark.parametrize("kind", KINDS)
def test_steps_bring_the_guess_before_each_place_to_the_targets_row(kind):
    draft, taught = online(kind), lesson([3, 7, 12])
    before = guesses(draft, taught.tokens)
    losses = [draft.learn([taught]) for _ in range(12)]
    draft.publish([])
    after = guesses(draft, taught.tokens)
    fkl = divergence("fkl")
    rows = torch.stack(taught.logits)
    at = torch.tensor(taught.places) - 1
    assert losses[0] == pytest.approx(float(fkl(rows, before[at]).mean()), rel=1e-5)
    assert losses[-1] < 0.9 * losses[0], losses
    assert float(fkl(rows, after[at]).mean()) < 0.9 * losses[0]
    with torch.no_grad():
        plain = draft.master(input_ids=torch.tensor([taught.tokens]), use_cache=False).logits[0]
    assert torch.allclose(after, plain, atol=1e-4), (after - plain).abs().max()


def test_a_step_on_two_lessons_is_one_on_the_mean_over_all_places():
    one, two = lesson([4, 6, 12]), lesson([9], length=9, seed=2)
    alone, together = online("llama"), online("llama")
    first, second = alone.learn([one]), online("llama").learn([two])
    assert together.learn([one, two]) == pytest.approx((3 * first + second) / 4)


def test_only_the_latest_part_of_a_long_text_is_read():
    whole = lesson([30, 60, 90], length=90)
    part = whole.recent(40)
    assert part.places == [10, 40]
    assert online("llama", max_length=40).learn([whole]) == pytest.approx(online("llama").learn([part]), rel=1e-9)


def test_weights_that_come_back_are_those_that_were_kept():
    draft, taught = online("llama"), lesson([3, 7])
    kept = draft.weights()
    draft.learn([taught])
    assert not all(torch.equal(old, new) for old, new in zip(kept, draft.weights(), strict=True))
    draft.restore(kept)
    assert all(torch.equal(old, new) for old, new in zip(kept, draft.weights(), strict=True))


def test_a_copy_in_use_is_left_alone_and_the_weights_wait_if_both_are():
    draft, taught = online("llama"), lesson([3, 7])
    first = draft.publish([draft.drafter])
    draft.learn([taught])
    held = [weight.clone() for weight in first.lm.model.parameters()]
    second = draft.publish([first])
    assert second.lm is not first.lm
    draft.learn([taught])
    assert draft.publish([first, second]) is None
    assert draft.drafter is second
    assert all(torch.equal(old, new) for old, new in zip(held, first.lm.model.parameters(), strict=True))
    third = draft.publish([second])
    assert third.lm is first.lm
    assert third is not first
