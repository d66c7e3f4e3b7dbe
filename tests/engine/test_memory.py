"""Requests that do not fit into memory wait or are refused before they start; none fails in the middle."""

from contextlib import suppress

import pytest
import torch

import outrider
from outrider.core.types import InputError, Sampling
from outrider.drafters.ngram import NgramDrafter
from outrider.engine.engine import Engine
from outrider.lm.model import LanguageModel
from outrider.lm.protocol import Segment
from outrider.lm.recurrent import RecurrentModel
from outrider.lm.slots.slots import BRANCHES
from outrider.verifiers.match import MatchVerifier
from tests.world.counting import texts
from tests.world.models import llama
from tests.world.parts import parts_of
from tests.world.recurrent_zoo import tiny_recurrent

GREEDY = Sampling(temperature=0.0, seed=0)
POSITION = 256
"""Bytes of one position of the target."""
CONTEXT, SLOTS = 1984, 4


def engine(monkeypatch: pytest.MonkeyPatch, positions: int | None, max_context: int | None = CONTEXT) -> Engine:
    """An engine whose target may hold so many positions; None: memory is plentiful."""
    if positions is not None:
        # 80 % of what is free may be used, and two thirds of that while storage grows.
        free = int(positions * POSITION * 1.5 / 0.8) + 2 * POSITION
        monkeypatch.setattr("outrider.lm.slots.budget.free_bytes", lambda device: free)
    target = LanguageModel(llama(context=2048).float(), max_slots=SLOTS, max_context=max_context, overcommit=True)
    monkeypatch.undo()
    parts = parts_of(target, NgramDrafter(prompt_lookup_min=1), verifier=MatchVerifier())
    return Engine(parts, max_slots=SLOTS)


def test_a_request_waits_until_it_fits_and_says_what_it_says_with_plenty_of_memory(monkeypatch) -> None:
    positions = 2 * (CONTEXT + BRANCHES + 64)
    tight, free = engine(monkeypatch, positions), engine(monkeypatch, None)
    prompts = texts([1300, 30, 20, 1200, 1700, 10, 15, 12, 9, 8, 7])
    target, most = tight.parts.target, 0
    ids = [tight.add(prompt, max_new_tokens=24, sampling=GREEDY) for prompt in prompts]
    outputs, together = {}, []
    while tight.busy:
        for update in tight.step():
            if update.output is not None:
                outputs[update.id] = update.output
        together.append(len(tight.running))
        most = max(most, target.num_bytes)
    assert most <= positions * POSITION + 2 * POSITION
    wanted = free.generate(prompts, max_new_tokens=24, sampling=GREEDY)
    assert [outputs[id].tokens for id in ids] == [output.tokens for output in wanted]
    assert all(output.finish_reason == "length" for output in outputs.values())
    # A long request leaves room for one more; short ones run four at a time.
    assert together[0] == 2
    assert max(together) == SLOTS


def test_a_request_that_waits_is_not_overtaken(monkeypatch) -> None:
    tight = engine(monkeypatch, CONTEXT + BRANCHES + 64)
    first, long, short = (tight.add(prompt, max_new_tokens=8, sampling=GREEDY) for prompt in texts([900, 1800, 5]))
    seen = []
    while tight.busy:
        tight.step()
        seen.append(tuple(tight.running))
    assert {(first,), (long,), (short,)} <= {*seen}
    assert all(len(running) <= 1 for running in seen)
    assert seen.index((first,)) < seen.index((long,)) < seen.index((short,))


def test_the_slot_that_a_request_continues_is_neither_counted_twice_nor_given_up_for_it(monkeypatch) -> None:
    tight = engine(monkeypatch, 2 * (CONTEXT + BRANCHES + 64))
    old, other, third = texts([700, 710, 720])
    said = [tight.generate([prompt], max_new_tokens=8, sampling=GREEDY)[0].tokens for prompt in (old, other, third)]
    assert len(tight._schedule.prefixes) == 3
    # At its full length there is memory for one of the others, and the oldest slot is the one that it continues.
    [again] = tight.generate([[*old, *said[0], 5, 6, 7]], max_new_tokens=1000, sampling=GREEDY)
    assert len(again.tokens) == 1000
    assert again.reused_tokens >= len(old)
    [kept] = tight.generate([[*third, *said[2], 5]], max_new_tokens=2, sampling=GREEDY)
    assert kept.reused_tokens >= len(third)


def test_a_shortened_context_refuses_what_it_would_cut(monkeypatch) -> None:
    lowered = engine(monkeypatch, 4 * 960, max_context=None)
    longest = lowered.parts.target.max_context
    assert longest == 959
    with pytest.raises(InputError, match=r"pass the 959 tokens .* max_new_tokens=859 or less, .* max_context=1100, "):
        lowered.add([5] * 100, max_new_tokens=1000)
    [output] = lowered.generate([[5] * 100], max_new_tokens=859, sampling=GREEDY)
    assert len(output.tokens) == 859
    # What the sentence advises works.
    asked = engine(monkeypatch, 4 * 960, max_context=1100)
    assert len(asked.generate([[5] * 100], max_new_tokens=1000, sampling=GREEDY)[0].tokens) == 1000


def test_a_context_that_not_even_one_slot_could_have_is_refused(monkeypatch) -> None:
    with pytest.raises(InputError, match="lower max_slots or max_context"):
        engine(monkeypatch, CONTEXT)


def test_the_target_of_an_engine_may_be_asked_for_more_than_fits_at_once(monkeypatch) -> None:
    monkeypatch.setattr("outrider.lm.slots.budget.free_bytes", lambda device: 35 * 10**5)
    loaded = outrider.load(llama(context=2048).float(), drafter="none", max_slots=SLOTS, max_context=2048, probe=False)
    assert loaded.parts.target.overcommitted
    assert loaded.parts.target.possible_context == 2048
    monkeypatch.undo()
    outputs = loaded.generate(texts([1900, 1900, 1900]), max_new_tokens=4, sampling=GREEDY)
    assert [output.finish_reason for output in outputs] == ["length"] * 3


def test_slots_that_nobody_asked_for_room_for_fail_and_leave_the_others_as_they_are(monkeypatch) -> None:
    target = engine(monkeypatch, CONTEXT + BRANCHES + 64).parts.target
    assert target.holds([CONTEXT])
    assert not target.holds([CONTEXT, 5])
    text, one = torch.arange(1600) % 50, target.open()
    before = target.extend([Segment(slot=one, tokens=text, logits="last")]).logits
    target.commit({one: range(1600)})
    other = target.open()
    with pytest.raises(RuntimeError, match="2 slots of 1600 tokens do not fit in memory at once"):
        target.extend([Segment(slot=other, tokens=text)])
    target.release(other)
    target.truncate(one, 1000)
    after = target.extend([Segment(slot=one, tokens=text[1000:], logits="last")]).logits
    assert torch.allclose(after, before, atol=1e-3)


def test_recurrent_models_share_memory_too(monkeypatch) -> None:
    model, lm = tiny_recurrent("jamba"), None
    for free in range(10**5, 10**7, 10**5):
        monkeypatch.setattr("outrider.lm.recurrent.available_bytes", lambda *_, free=free: free)
        with suppress(InputError):
            lm = RecurrentModel(model, max_slots=4, max_context=380, overcommit=True)
            break
    assert lm is not None
    assert lm.overcommitted
    assert lm.holds([380])
    assert not lm.holds([380] * 4)
    lm.extend([Segment(slot=lm.open(), tokens=torch.arange(379) % 50, logits="last")])


def test_a_copy_in_another_type_has_as_long_a_context_as_memory_allows(monkeypatch) -> None:
    lm = LanguageModel(llama(context=2048).bfloat16(), max_slots=SLOTS, max_context=2048)
    assert lm.max_context == 2048
    monkeypatch.setattr("outrider.lm.slots.budget.free_bytes", lambda device: 35 * 10**5)
    wide = lm.cast(torch.float32)
    assert wide.dtype == torch.float32
    assert 0 < wide.max_context < 2048
