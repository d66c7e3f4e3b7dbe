"""Which places of a text teach a drafter, and what is kept of them."""

import numpy as np
import pytest
import torch

from outrider.core.types import Sampling
from outrider.training.online.corrections import Buffer, Correction, corrections
from tests.world.models import engine, raw_logits

PROMPTS = [[5, 6, 7, 5, 6], [9, 8, 9], [11, 12, 13, 14]]


def noted(decoder, **options):
    """Corrections of a run, and the steps of its outputs."""
    found = []
    decoder.watch = lambda cycle: found.extend(corrections(cycle))
    return found, decoder.generate(PROMPTS, max_new_tokens=24, **options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_correction_holds_the_targets_row_of_the_token_that_replaced_a_draft_token(temperature):
    found, outputs = noted(engine("model"), sampling=Sampling(temperature=temperature, seed=3))
    texts = {out.id: [*prompt, *out.tokens] for prompt, out in zip(PROMPTS, outputs, strict=True)}
    assert len(found) > 10
    for each in found:
        place = len(each.tokens)
        # The last tokens of a step may lie behind the end of the output.
        text = texts[each.request]
        assert each.tokens[: len(text)] == text[:place]
        expected = raw_logits(each.tokens)[-1]
        assert torch.allclose(each.logits, expected, atol=1e-9), (each.logits - expected).abs().max()
        if temperature == 0.0 and place < len(text):
            assert int(expected.argmax()) == text[place]


def test_a_step_has_a_correction_exactly_if_a_draft_token_was_rejected():
    found, outputs = noted(engine("model"), sampling=Sampling(temperature=1.0, seed=1))
    for out in outputs:
        rejected = sum(step.num_accepted_tokens < step.num_draft_tokens for step in out.steps)
        assert sum(each.request == out.id for each in found) == rejected
    assert any(step.num_accepted_tokens == step.num_draft_tokens > 0 for out in outputs for step in out.steps)


def test_a_place_behind_an_end_token_teaches_nothing():
    plain, outputs = noted(engine("model"), sampling=Sampling(temperature=0, seed=1))
    ends = frozenset(out.tokens[4] for out in outputs)
    found, ended = noted(engine("model", eos_ids=ends), sampling=Sampling(temperature=0, seed=1))
    assert 0 < len(found) < len(plain)
    prompts = {out.id: len(prompt) for prompt, out in zip(PROMPTS, ended, strict=True)}
    assert all(ends.isdisjoint(each.tokens[prompts[each.request] :]) for each in found)


def test_what_is_kept_can_be_trained_on():
    found, _ = noted(engine("model"), sampling=Sampling(temperature=1.0, seed=1))
    weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
    (weight * found[0].logits).sum().backward()
    assert weight.grad is not None


def correction(id: str, *tokens: int) -> Correction:
    return Correction(request=id, drafter=None, tokens=list(tokens), logits=torch.full((4,), float(len(tokens))))


def test_a_buffer_drops_the_oldest_corrections_and_never_holds_more_than_its_limit():
    buffer = Buffer(most=5)
    for length in range(2, 12):
        for id in "ab":
            buffer.add(correction(id, *range(length)))
            assert len(buffer) <= 5
    lessons = buffer.take()
    assert sum(len(lesson.places) for lesson in lessons) == 5
    assert len(buffer) == 0
    for lesson in lessons:
        assert lesson.places == sorted(lesson.places)
        assert lesson.places[-1] == len(lesson.tokens) == 11
        assert [float(row[0]) for row in lesson.logits] == lesson.places


def test_a_correction_that_is_found_again_counts_once():
    buffer = Buffer(most=5)
    for tokens in ([1, 2], [1, 2], [1, 2, 3]):
        buffer.add(correction("a", *tokens))
    assert len(buffer) == 2
    [lesson] = buffer.take()
    assert lesson.places == [2, 3]


def test_the_recent_part_of_a_lesson_keeps_places_whose_guess_it_can_read():
    buffer = Buffer(most=9)
    for length in (2, 5, 6, 9):
        buffer.add(correction("a", *range(length)))
    [lesson] = buffer.take()
    recent = lesson.recent(4)
    assert recent.tokens == [5, 6, 7, 8]
    # Token 6 is guessed after token 5, the first of the part. Token 5 is guessed after token 4, which is cut off.
    assert recent.places == [1, 4]
    assert [float(row[0]) for row in recent.logits] == [6.0, 9.0]
    assert lesson.recent(100).places == lesson.places == [2, 5, 6, 9]
    assert np.array_equal(lesson.recent(9).tokens, lesson.tokens)
