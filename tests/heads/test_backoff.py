"""The n-gram model: a law behind every context, the counts of the texts, its file."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

from outrider.core.types import InputError
from outrider.heads.parts.backoff import FILE, USUAL_DISCOUNT, BackoffModel, read_backoff, write_backoff

VOCAB = 7


def texts() -> list[np.ndarray]:
    dice = np.random.default_rng(0)
    return [dice.choice(VOCAB - 1, p=[0.4, 0.3, 0.1, 0.1, 0.05, 0.05], size=size) for size in (40, 3, 60, 1, 0)]


def contexts(width: int) -> np.ndarray:
    """All contexts of some tokens, those with missing tokens too; the last token was never seen."""
    grids = np.meshgrid(*[np.arange(-1, VOCAB)] * width, indexing="ij")
    return np.stack([grid.ravel() for grid in grids], 1) if width else np.zeros((1, 0), dtype=int)


def naive(order: int, least: int, context: tuple[int, ...], token: int) -> float:
    """The formula, from dictionaries of counts."""
    context = context[len(context) - order + 1 :] if order > 1 else ()
    singles = Counter(int(t) for text in texts() for t in text)
    probability = (singles[token] + 1) / (sum(singles.values()) + VOCAB)
    for length in range(1, len(context) + 1):
        prefix = context[len(context) - length :]
        counts = Counter(
            tuple(text[i : i + length + 1].tolist()) for text in texts() for i in range(len(text) - length)
        )
        kept = {gram for gram, count in counts.items() if count >= least}
        if length > 1:
            shorter = Counter(tuple(text[i : i + length].tolist()) for text in texts() for i in range(len(text)))
            if shorter[prefix] < least:
                break
            # Longer n-grams are counted behind n-grams that were kept.
            kept = {gram for gram in kept if shorter[gram[:-1]] >= least}
            counts = Counter({gram: count for gram, count in counts.items() if shorter[gram[:-1]] >= least})
        once, twice = (sum(count == n for count in counts.values()) for n in (1, 2))
        discount = once / (once + 2 * twice) if once and twice else USUAL_DISCOUNT
        total = sum(count for gram, count in counts.items() if gram[:-1] == prefix)
        if not total:
            continue
        rest = 1 - sum((counts[gram] - discount) / total for gram in kept if gram[:-1] == prefix)
        seen = (counts[(*prefix, token)] - discount) / total if (*prefix, token) in kept else 0.0
        probability = seen + rest * probability
    return probability


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_behind_every_context_stands_a_law(order, least):
    model = BackoffModel.count(texts(), vocab_size=VOCAB, order=order, least=least)
    before = contexts(min(order, 3))
    scores = model.score(before, np.broadcast_to(np.arange(VOCAB), (len(before), VOCAB)))
    assert np.abs(np.exp(scores).sum(1) - 1).max() < 1e-5
    assert scores.min() > -np.inf


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_the_law_is_that_of_the_formula(order, least):
    model = BackoffModel.count(texts(), vocab_size=VOCAB, order=order, least=least)
    seen = [context for context in contexts(2).tolist() if -1 not in context]
    scores = model.score(np.array(seen), np.broadcast_to(np.arange(VOCAB), (len(seen), VOCAB)))
    for context, row in zip(seen, scores, strict=True):
        expected = [naive(order, least, tuple(context), token) for token in range(VOCAB)]
        assert np.allclose(np.exp(row), expected, atol=1e-5), context


def test_no_ngram_crosses_the_end_of_a_text():
    model = BackoffModel.count([np.array([1, 2]), np.array([3, 4])], vocab_size=VOCAB, order=3, least=1)
    assert model.keys[0].tolist() == [1 * VOCAB + 2, 3 * VOCAB + 4]
    assert model.keys[1].tolist() == []


def test_what_is_written_reads_back(tmp_path):
    model = BackoffModel.count(texts(), vocab_size=VOCAB, order=3, least=1)
    write_backoff(model, tmp_path)
    again = read_backoff(str(tmp_path / FILE))
    assert (again.order, again.vocab_size) == (3, VOCAB)
    before = contexts(2)
    tokens = np.broadcast_to(np.arange(VOCAB), (len(before), VOCAB))
    assert np.array_equal(again.score(before, tokens), model.score(before, tokens))


def test_wrong_input_is_refused_in_one_sentence(tmp_path):
    for wrong, message in (
        ({"order": 5}, r"must be in 1\.\.4, got 5"),
        ({"least": 0}, "must be >= 1, got 0"),
        ({"vocab_size": 3}, "tokens must be below 3, got 5"),
    ):
        with pytest.raises(InputError, match=message):
            BackoffModel.count(texts(), **({"vocab_size": VOCAB} | wrong))
    (tmp_path / FILE).write_bytes(b"nothing")
    with pytest.raises(InputError, match="holds no n-gram model"):
        read_backoff(str(tmp_path / FILE))
    save_file({"keys.2": np.zeros(2)}, tmp_path / FILE)
    with pytest.raises(InputError, match="holds no n-gram model"):
        read_backoff(str(tmp_path / FILE))
    model = BackoffModel.count(texts(), vocab_size=VOCAB, order=2, least=1)
    for damaged in ({"logs": (model.logs[0][1:], model.logs[1])}, {"rests": (model.rests[0][1:],)}):
        write_backoff(replace(model, **damaged), tmp_path)
        with pytest.raises(InputError, match="do not fit each other"):
            read_backoff(str(tmp_path / FILE))
