"""Positions of training texts, and acceptance by position."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given as for_any
from hypothesis import strategies as st

from outrider.core.types import InputError
from outrider.heads.objective import slot_balanced
from outrider.learning.batch import Document, TrainBatch
from outrider.learning.divergences import divergence
from outrider.training.data.batches import Batches
from outrider.training.distill import Distilled
from outrider.training.positions import RandomGaps, RandomPadding, acceptance_by_position, positions_of
from tests.world.zoo import VOCAB, tiny

LIMIT = 300


def batch(step: int = 0, rows: int = 4, low: int = 8, high: int = 40) -> TrainBatch:
    dice = np.random.default_rng(1)
    texts = [
        Document(tokens=dice.integers(3, VOCAB, size=size), start=2) for size in dice.integers(low, high, size=rows)
    ]
    return Batches(texts, batch_size=rows, max_length=64, seed=0).batch(step)


def shifted(tokens: torch.Tensor, by: int) -> torch.Tensor:
    return (torch.arange(tokens.shape[1]) + by).expand_as(tokens)


class At:
    """Given positions."""

    def __init__(self, places: torch.Tensor) -> None:
        self.places = places

    def __call__(self, batch: TrainBatch) -> torch.Tensor:
        return self.places


def loss(name: str, places: torch.Tensor | None, given: TrainBatch) -> float:
    positions = None if places is None else At(places)
    made = Distilled(tiny(name, seed=1).float(), tiny(name).float(), loss=divergence("fkl"), positions=positions)
    with torch.no_grad():
        return float(made(given).total)


def logits(name: str, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        model = tiny(name).float()
        return model(
            input_ids=tokens, position_ids=places, attention_mask=torch.ones_like(tokens), use_cache=False
        ).logits


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "gpt_neox"])
def test_a_common_offset_changes_nothing_under_rotary_positions_and_gaps_do(name):
    tokens = batch(low=12, high=13).tokens
    plain = logits(name, tokens, shifted(tokens, 0))
    assert torch.allclose(logits(name, tokens, shifted(tokens, 250)), plain, atol=1e-3)
    gaps = shifted(tokens, 0).clone()
    gaps[:, 6:] += 200
    assert float((logits(name, tokens, gaps) - plain).abs().max()) > 1e-2


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_a_common_offset_matters_where_positions_have_a_table(name):
    tokens = batch(low=12, high=13).tokens
    moved = logits(name, tokens, shifted(tokens, 250))
    assert float((moved - logits(name, tokens, shifted(tokens, 0))).abs().max()) > 1e-2


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_token_behind_a_gap_sees_the_tokens_before_it(name):
    given = batch(rows=1, low=12, high=13)
    places = shifted(given.tokens, 0).clone()
    places[:, 8:] += 20
    other = given.tokens.clone()
    other[:, 1] = (other[:, 1] + 1) % VOCAB
    made = Distilled(tiny(name).float(), tiny(name).float(), loss=divergence("fkl"), positions=At(places))
    with torch.no_grad():
        before, after = made._hidden(given), made._hidden(replace(given, tokens=other))
    assert not torch.allclose(before[:, -1], after[:, -1], atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_learner_at_the_usual_positions_has_the_loss_of_one_without(name):
    given = batch()
    assert loss(name, shifted(given.tokens, 0), given) == pytest.approx(loss(name, None, given), rel=1e-5)


def test_padding_moves_whole_texts_to_any_place_that_has_room():
    text, limit, firsts = batch(rows=2, low=60, high=61), 100, set()
    for step in range(400):
        places = RandomPadding(limit=limit)(replace(text, step=step))
        assert (places.diff() == 1).all()
        firsts |= set(places[:, 0].tolist())
    assert firsts == set(range(41))


def test_padding_trains_the_rows_of_a_table_that_short_texts_never_reach():
    given = batch()
    for positions, wider in ((None, False), (RandomPadding(limit=LIMIT), True)):
        model = tiny("gpt2", seed=1).float()
        made = Distilled(model, tiny("gpt2").float(), loss=divergence("fkl"), positions=positions)
        for step in range(20):
            made(replace(given, step=step)).total.backward()
        reached = model.transformer.wpe.weight.grad.abs().sum(-1).nonzero()
        assert (int(reached.max()) >= given.tokens.shape[1]) is wider


@for_any(
    lengths=st.lists(st.integers(2, 60), min_size=1, max_size=4),
    num_gaps=st.integers(1, 5),
    together=st.integers(1, 40),
    room=st.integers(0, 200),
    seed=st.integers(0, 99),
)
def test_gaps_leave_the_order_the_last_tokens_and_the_limit(lengths, num_gaps, together, room, seed):
    limit = max(lengths) + room
    tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    given = TrainBatch(
        tokens=tokens, learnt=tokens.bool(), lengths=torch.tensor(lengths), step=seed, rows=range(len(lengths))
    )
    places = RandomGaps(limit=limit, num_gaps=num_gaps, together=together, seed=seed)(given)
    for row, count in zip(places, lengths, strict=True):
        own = row[:count]
        assert own[0] == 0
        assert own[-1] < limit
        jumps = (own.diff() > 1).nonzero().flatten() + 1
        assert (own.diff() >= 1).all()
        assert len(jumps) <= num_gaps
        assert all(place <= count - together for place in jumps.tolist())
        if count > together and limit > count:
            assert own[-1] > count - 1


@pytest.mark.parametrize("positions", [RandomPadding(limit=LIMIT, seed=3), RandomGaps(limit=LIMIT, seed=3)])
def test_draws_of_a_row_do_not_depend_on_other_rows(positions):
    whole = batch()
    some = Batches.share(whole, range(1, 3))
    assert torch.equal(positions(whole)[1:3, : some.tokens.shape[1]], positions(some))
    assert not torch.equal(positions(whole), positions(replace(whole, step=1)))


@pytest.mark.parametrize("positions", [RandomPadding(limit=20), RandomGaps(limit=20)])
def test_a_text_that_is_too_long_is_refused(positions):
    with pytest.raises(InputError, match="20 positions"):
        positions(batch(low=30, high=31))


@for_any(st.lists(st.integers(0, 50), min_size=1, max_size=6))
def test_every_slot_has_the_same_weight(counts):
    totals = torch.tensor(counts) * slot_balanced(torch.tensor(counts))
    some = [float(total) for total, count in zip(totals, counts, strict=True) if count]
    assert some == pytest.approx([sum(counts) / max(len(some), 1)] * len(some), rel=1e-5)
    assert float(totals.sum()) == pytest.approx(sum(counts), rel=1e-5)


@for_any(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 4000)), min_size=1, max_size=40))
def test_buckets_hold_every_row_once_and_their_own_mean(rows):
    values, places = (np.array(column) for column in zip(*rows, strict=True))
    buckets = acceptance_by_position(values, places)
    assert sum(bucket.count for bucket in buckets) == len(rows)
    for bucket in buckets:
        own = [v for v, p in rows if bucket.first <= p and (bucket.end is None or p < bucket.end)]
        assert len(own) == bucket.count
        assert bucket.acceptance == (pytest.approx(np.mean(own)) if own else None)


def test_wrong_names_and_numbers_are_refused():
    assert positions_of("plain", 9, 0) is None
    assert positions_of("padding", 9, 1) == RandomPadding(limit=9, seed=1)
    assert positions_of("gaps", 9, 1) == RandomGaps(limit=9, seed=1)
    with pytest.raises(InputError, match="plain, padding or gaps"):
        positions_of("gap", 9, 0)
    with pytest.raises(InputError, match="num_gaps"):
        RandomGaps(limit=9, num_gaps=0)
    with pytest.raises(InputError, match=">= 1, got 0"):
        RandomPadding(limit=0)
    for borders in ((0, 3), (4, 3), (4, 4)):
        with pytest.raises(InputError, match="borders"):
            acceptance_by_position(np.ones(1), np.zeros(1, dtype=int), borders)
