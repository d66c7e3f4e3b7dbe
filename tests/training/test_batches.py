"""Batches are a function of seed and step, and lose no document and no token."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Float
from torch import Tensor

from outrider.core.types import InputError
from outrider.learning.batch import Document
from outrider.learning.top_rows import TopRows
from outrider.training.data.batches import Batches, CapturedStates
from outrider.training.data.documents import Corpus, fingerprint_of


def corpus(*lengths: int, start: int = 0) -> list[Document]:
    """Documents whose tokens tell their number and place: 100 * number + place."""
    return [Document(tokens=100 * n + np.arange(length), start=start) for n, length in enumerate(lengths)]


@given(st.lists(st.integers(2, 20), min_size=1, max_size=9), st.integers(1, 5), st.integers(2, 12), st.integers(0, 3))
def test_a_batch_is_a_function_of_seed_and_step(lengths: list[int], rows: int, most: int, seed: int) -> None:
    def batches() -> Batches:
        return Batches(corpus(*lengths), batch_size=rows, max_length=most, seed=seed)

    forwards = [batches().batch(step) for step in range(5)]
    used = batches()
    backwards = [used.batch(step) for step in reversed(range(5))][::-1]
    for one, two in zip(forwards, backwards, strict=True):
        assert torch.equal(one.tokens, two.tokens)
        assert torch.equal(one.learnt, two.learnt)


@given(st.lists(st.integers(2, 20), min_size=1, max_size=9), st.integers(1, 4), st.integers(2, 12))
def test_each_epoch_has_every_document_once(lengths: list[int], rows: int, most: int) -> None:
    batches = Batches(corpus(*lengths), batch_size=rows, max_length=most, seed=1)
    seen = [int(token) // 100 for step in range(3 * len(lengths)) for token in batches.batch(step).tokens[:, 0]]
    for epoch in range(3 * rows):
        numbers = seen[epoch * len(lengths) : (epoch + 1) * len(lengths)]
        assert sorted(numbers) == list(range(len(lengths)))


def test_epochs_differ_in_order_and_seeds_do() -> None:
    def order(seed: int, step: int) -> list[int]:
        batches = Batches(corpus(*[3] * 30), batch_size=30, max_length=3, seed=seed)
        return batches.batch(step).tokens[:, 0].tolist()

    assert len({tuple(order(seed, step)) for seed in range(2) for step in range(3)}) == 6


@given(st.integers(0, 12), st.integers(2, 20), st.integers(2, 30), st.integers(0, 50))
def test_a_row_learns_the_answer_and_neither_prompt_nor_padding(start: int, answer: int, most: int, step: int) -> None:
    length = start + answer
    batch = Batches(corpus(length, start=start), batch_size=1, max_length=most, seed=0).batch(step)
    size = min(length, most)
    [first] = batch.tokens[:, 0].tolist()
    assert batch.lengths.tolist() == [size]
    assert batch.tokens[0].tolist() == list(range(first, first + size))
    assert batch.learnt[0].tolist() == [j > 0 and first + j >= start for j in range(size)]
    assert batch.learnt.any()


def test_every_part_of_a_long_document_is_drawn() -> None:
    batches = Batches(corpus(12), batch_size=1, max_length=8, seed=3)
    drawn = [int(batches.batch(step).tokens[0, 0]) for step in range(300)]
    assert set(drawn) == {0, 1, 2, 3, 4}
    assert min(drawn.count(first) for first in range(5)) > 30, drawn


def test_shares_of_a_batch_are_its_rows() -> None:
    batch = Batches(corpus(4, 9, 2, 7, start=1), batch_size=4, max_length=8, seed=0).batch(1)
    shares = [Batches.share(batch, range(n, n + 2)) for n in (0, 2)]
    nested = [Batches.share(share, range(n, n + 1)) for share in shares for n in share.rows]
    for share in [*shares, *nested]:
        width = share.tokens.shape[1]
        assert width == int(share.lengths.max())
        assert torch.equal(share.tokens, batch.tokens[share.rows.start : share.rows.stop, :width])
        assert torch.equal(share.learnt, batch.learnt[share.rows.start : share.rows.stop, :width])
    assert sum(int(share.learnt.sum()) for share in nested) == int(batch.learnt.sum())
    with pytest.raises(ValueError, match="rows must be some of"):
        Batches.share(shares[0], range(1, 3))


class Numbered:
    """States that tell the document and the token that they belong to."""

    def states(self, number: int, first: int = 0, last: int | None = None) -> CapturedStates:
        assert last is not None
        place = 100.0 * number + torch.arange(first, last)
        logits = torch.stack([place, place + 1, place + 2], -1)
        return CapturedStates(hidden={2: place[:, None].repeat(1, 4)}, rows=TopRows.of(logits, 1), logits=logits)


def test_captured_states_stand_at_their_tokens() -> None:
    batches = Batches(corpus(3, 20, 7), batch_size=3, max_length=6, seed=0, captured=Numbered())
    for step in range(4):
        whole = batches.batch(step)
        for batch in (whole, Batches.share(whole, range(1, 3))):
            inside = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
            assert torch.equal(batch.hidden[2][..., 0].long()[inside], batch.tokens[inside])
            assert batch.hidden[2][~inside].abs().sum() == 0
            assert batch.rows_of_target is not None
            assert batch.rows_of_target.tokens.shape == (*batch.tokens.shape, 1)
            assert batch.logits_of_target is not None
            assert torch.equal(batch.logits_of_target[inside][:, 0].long(), batch.tokens[inside])


def test_wrong_numbers_are_named() -> None:
    for options, words in [
        ({"batch_size": 0}, "batch_size must be >= 1, got 0"),
        ({"max_length": 1}, "max_length must be >= 2, got 1"),
        ({"seed": -1}, "seed must be >= 0, got -1"),
    ]:
        with pytest.raises(InputError, match=words):
            Batches(corpus(3), **{"batch_size": 1, "max_length": 4, "seed": 0, **options})
    with pytest.raises(InputError, match="the corpus is empty"):
        Batches([], batch_size=1, max_length=4, seed=0)
    with pytest.raises(InputError, match="document 0 has no token to learn"):
        Batches(corpus(3, start=3), batch_size=1, max_length=4, seed=0).batch(0)


def test_a_corpus_on_disk_gives_back_its_documents() -> None:
    given = [*corpus(3, 5, 2, start=1), Document(tokens=np.arange(4), start=4, domain="math")]
    kept = Corpus(iter(given))
    assert [(d.tokens.tolist(), d.start, d.domain) for d in kept] == [
        (d.tokens.tolist(), d.start, d.domain) for d in given
    ]
    assert fingerprint_of(kept) == fingerprint_of(given) != fingerprint_of(given[1:])


def test_long_documents_are_cut_and_counted() -> None:
    kept = Corpus(corpus(3, 9, 8), max_tokens=8)
    assert [len(document.tokens) for document in kept] == [3, 8, 8]
    assert str(kept) == "3 documents with 19 tokens; 1 were longer than 8 tokens and were cut"
    with pytest.raises(InputError, match="the corpus is empty"):
        Corpus([])


def rows_of(logits: Float[Tensor, "n vocab"], k: int) -> TopRows:
    return TopRows.of(logits, k)


def test_grouped_rows_are_a_distribution_and_bound_the_divergence_from_below() -> None:
    p, q = torch.randn(5, 11), torch.randn(5, 11, requires_grad=True)
    whole = (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1)
    before = torch.zeros(5)
    for k in (1, 4, 10):
        rows = rows_of(p, k)
        assert torch.allclose(rows.outcomes.exp().sum(-1), torch.ones(5))
        assert torch.allclose(rows.grouped(p), rows.outcomes, atol=1e-5)
        part = (rows.outcomes.exp() * (rows.outcomes - rows.grouped(q))).sum(-1)
        assert (part >= before - 1e-5).all()
        assert (part <= whole + 1e-5).all()
        before = part.detach()
    assert torch.allclose(part, whole, atol=1e-5)
    part.sum().backward()
    assert q.grad is not None
    assert torch.allclose(q.grad, q.softmax(-1) - p.softmax(-1), atol=1e-5)
    with pytest.raises(InputError, match=r"must be in 1\.\.10, got 11"):
        rows_of(p, 11)
