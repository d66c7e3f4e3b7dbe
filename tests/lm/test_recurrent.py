"""Hybrid and recurrent models over slots say what the plain model says, after any rejection, in ragged batches."""

import numpy as np
import pytest
import torch

from outrider.core.types import InputError
from outrider.lm.hf.anatomy import STEPWISE, Anatomy
from outrider.lm.hf.support import refusal
from outrider.lm.open import as_lm
from outrider.lm.protocol import Segment
from outrider.lm.recurrent import RecurrentModel
from tests.lm.oracle import Growth, Pair
from tests.world.recurrent_zoo import RECURRENT, recurrent_config, tiny_recurrent
from tests.world.zoo import VOCAB, tiny


def draw(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(0, VOCAB, count).tolist()


def prefill(pair: Pair, lengths: dict[int, int], rng: np.random.Generator, logits: str = "none") -> None:
    """Prefill a ragged prompt per slot."""
    pair.extend([Growth(slot=s, tokens=draw(rng, n), logits=logits) for s, n in lengths.items()])
    pair.commit({s: range(n) for s, n in lengths.items()})


@pytest.mark.parametrize("name", RECURRENT)
def test_every_token_says_what_a_plain_run_over_its_text_says(name: str) -> None:
    rng = np.random.default_rng(0)
    pair = Pair(lm=RecurrentModel(tiny_recurrent(name), max_slots=3, max_context=160))
    first, second, third = slots = [pair.open() for _ in range(3)]
    prefill(pair, {first: 20, second: 13, third: 1}, rng)
    for accepted in ((1, 4, 0), (2, 3, 3), (0, 0, 1), (4, 4, 4), (1, 1, 1), (2, 2, 2)):
        lengths = (5, 5, 4)
        pair.extend([Growth(slot=s, tokens=draw(rng, n)) for s, n in zip(slots, lengths, strict=True)])
        pair.commit({s: range(n) for s, n in zip(slots, accepted, strict=True)})
    assert (pair.lm.num_replays > 0) != pair.lm.stepwise
    pair.extend([Growth(slot=first, tokens=draw(rng, 1)), Growth(slot=third, tokens=draw(rng, 2), logits="last")])
    pair.extend([Growth(slot=second, tokens=draw(rng, 3), logits="last"), Growth(slot=first, tokens=draw(rng, 1))])
    pair.commit({first: [0], second: [0, 1, 2], third: []})
    pair.extend([Growth(slot=s, tokens=draw(rng, 1)) for s in slots])
    pair.release(second)
    again = pair.open()
    prefill(pair, {again: 7}, rng, "last")
    pair.truncate(first, 9)
    pair.extend([Growth(slot=s, tokens=draw(rng, 2)) for s in (again, first, third)])


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "lfm2", "jamba", "mamba2"])
def test_a_model_fed_token_by_token_feeds_nothing_again(name: str) -> None:
    rng = np.random.default_rng(1)
    pair = Pair(lm=RecurrentModel(tiny_recurrent(name), max_slots=2))
    slots = [pair.open(), pair.open()]
    prefill(pair, {slots[0]: 9, slots[1]: 5}, rng, "last")
    for accepted in ((0, 3), (2, 1), (4, 0)):
        for _ in range(4):
            pair.extend([Growth(slot=s, tokens=draw(rng, 1)) for s in slots])
        pair.commit({s: range(n) for s, n in zip(slots, accepted, strict=True)})
    assert pair.lm.num_replayed_tokens == 0


def test_a_rejection_costs_no_forward_of_its_own_until_many_tokens_have_come_together() -> None:
    rng = np.random.default_rng(2)
    pair = Pair(lm=RecurrentModel(tiny_recurrent("qwen3_5"), max_slots=1))
    slot = pair.open()
    prefill(pair, {slot: 6}, rng)
    counts = []
    for _ in range(6):
        before = pair.lm.num_forwards
        pair.extend([Growth(slot=slot, tokens=draw(rng, 5))])
        counts.append(pair.lm.num_forwards - before)
        pair.commit({slot: range(3)})
    assert counts == [1, 1, 1, 2, 1, 1]
    assert pair.lm.num_replayed_tokens == 3 + 6 + 9 + 3 + 6


def test_rows_of_one_length_share_a_forward() -> None:
    rng = np.random.default_rng(3)
    pair = Pair(lm=RecurrentModel(tiny_recurrent("bamba"), max_slots=4))
    slots = [pair.open() for _ in range(4)]
    prefill(pair, dict.fromkeys(slots, 6), rng)
    assert pair.lm.num_forwards == 1
    pair.extend([Growth(slot=s, tokens=draw(rng, n)) for s, n in zip(slots, (3, 2, 3, 3), strict=True)])
    assert pair.lm.num_forwards == 3


def test_a_long_text_after_a_far_truncation_is_prefilled_again() -> None:
    rng = np.random.default_rng(4)
    for name in ("lfm2", "mamba"):
        lm = RecurrentModel(tiny_recurrent(name), max_slots=1)
        pair = Pair(lm=lm)
        slot = pair.open()
        prefill(pair, {slot: 300}, rng, "last")
        pair.truncate(slot, 290)
        pair.extend([Growth(slot=slot, tokens=draw(rng, 2))])
        assert lm.num_replayed_tokens == 290


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_both_kernels_are_exact(attention: str) -> None:
    rng = np.random.default_rng(5)
    for name in ("qwen3_next", "recurrent_gemma"):
        pair = Pair(lm=RecurrentModel(tiny_recurrent(name, attention=attention), max_slots=2))
        slots = [pair.open(), pair.open()]
        prefill(pair, {slots[0]: 12, slots[1]: 3}, rng)
        pair.extend([Growth(slot=s, tokens=draw(rng, 3)) for s in slots])
        pair.commit({slots[0]: [0], slots[1]: [0, 1]})
        pair.extend([Growth(slot=s, tokens=draw(rng, 2)) for s in slots])


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "jamba"])
def test_taps_are_those_of_the_new_tokens_only(name: str) -> None:
    rng = np.random.default_rng(6)
    lm = RecurrentModel(tiny_recurrent(name), max_slots=1)
    slot, text = lm.open(), draw(rng, 12)
    taps = (1, 2)
    lm.extend([Segment(slot=slot, tokens=torch.tensor(text[:6]))], taps)
    lm.commit({slot: range(3)})
    extension = lm.extend([Segment(slot=slot, tokens=torch.tensor(text[6:]), logits="last")], taps)
    assert lm.num_replays == 1
    whole = text[:3] + text[6:]
    with torch.no_grad():
        states = lm.model(torch.tensor([whole]), output_hidden_states=True, use_cache=False).hidden_states
    for k in taps:
        # Mamba-2 lists what leaves its layers, the others what enters them.
        entering = states[k - 1] if name == "mamba2" else states[k]
        torch.testing.assert_close(extension.taps[k], entering[0, 3:], atol=1e-9, rtol=0)


def test_nothing_stays_behind_on_the_model() -> None:
    model = tiny_recurrent("recurrent_gemma")
    text = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        before = model(text).logits
    lm = RecurrentModel(model, max_slots=1)
    slot = lm.open()
    lm.extend([Segment(slot=slot, tokens=torch.arange(9))])
    with torch.no_grad():
        torch.testing.assert_close(model(text).logits, before, atol=0, rtol=0)


def test_branching_segments_and_wrong_calls_raise_and_change_nothing() -> None:
    pair = Pair(lm=RecurrentModel(tiny_recurrent("qwen3_next"), max_slots=2, max_context=12))
    slot = pair.open()
    pair.extend([Growth(slot=slot, tokens=[1, 2, 3], parents=[-1, 0, 1])])
    one = torch.tensor([1])
    for parents in ([1], [-1], [3]):
        with pytest.raises(ValueError, match="cannot read a branching tree"):
            pair.lm.extend([Segment(slot=slot, tokens=one, parents=np.array(parents))])
    with pytest.raises(ValueError, match="is no path from the root"):
        pair.lm.commit({slot: [0, 2]})
    with pytest.raises(ValueError, match="is no path from the root"):
        pair.lm.commit({slot: [0, 1, 2, 3]})
    with pytest.raises(ValueError, match="two segments of one forward"):
        pair.lm.extend([Segment(slot=slot, tokens=one), Segment(slot=slot, tokens=one)])
    with pytest.raises(RuntimeError, match="slot 7 is not open"):
        pair.lm.extend([Segment(slot=7, tokens=one)])
    with pytest.raises(ValueError, match=r"taps must be in 0\.\.4"):
        pair.lm.extend([Segment(slot=slot, tokens=one)], taps=(5,))
    with pytest.raises(RuntimeError, match="0 committed and 3 pending tokens; 10 more pass max_context=12"):
        pair.lm.extend([Segment(slot=slot, tokens=torch.arange(10))])
    pair.extend([Growth(slot=slot, tokens=[4], parents=[2])])
    pair.commit({slot: [0, 1, 2, 3]})
    with pytest.raises(ValueError, match="4 committed tokens, cannot keep 5"):
        pair.lm.truncate(slot, 5)


def test_a_model_that_forgets_its_state_in_blocks_is_found_out_and_fed_token_by_token(monkeypatch) -> None:
    monkeypatch.setattr("outrider.lm.hf.anatomy.STEPWISE", ())
    for name in ("mamba", "jamba", "qwen3_next"):
        assert RecurrentModel(tiny_recurrent(name), max_slots=1).stepwise == (name in STEPWISE)


def test_the_right_way_is_opened_for_every_model() -> None:
    assert all(Anatomy.of(recurrent_config(name)).recurrent for name in RECURRENT)
    assert isinstance(as_lm(tiny_recurrent("mamba2"), max_slots=1), RecurrentModel)
    assert not isinstance(as_lm(tiny("llama"), max_slots=1), RecurrentModel)
    with pytest.raises(InputError, match="llama has no recurrent layers"):
        RecurrentModel(tiny("llama"))
    assert all(refusal(recurrent_config(name)) is None for name in RECURRENT)
