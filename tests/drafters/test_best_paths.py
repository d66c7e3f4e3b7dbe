"""The best paths through a lattice, against all of its paths."""

import itertools

import numpy as np
import pytest

from outrider.heads.parts.backoff import BackoffModel
from outrider.heads.parts.best_paths import BestPaths, best_paths
from tests.world.own_heads import grams

VOCAB = 6


def lattice(depth: int, choices: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    dice = np.random.default_rng(seed)
    tokens = np.stack([dice.permutation(VOCAB)[:choices] for _ in range(depth)])
    return tokens, -np.sort(dice.exponential(size=(depth, choices)), axis=1)


def every(
    tokens: np.ndarray, scores: np.ndarray, context: tuple[int, ...], model: BackoffModel | None, mu: float
) -> list[tuple[float, tuple[int, ...]]]:
    """All paths with their scores, the best first."""
    found = []
    for places in itertools.product(range(tokens.shape[1]), repeat=len(tokens)):
        path = tuple(int(tokens[i, place]) for i, place in enumerate(places))
        score = sum(float(scores[i, place]) for i, place in enumerate(places))
        for i, token in enumerate(path) if model is not None else ():
            before = np.array([[*context, *path[:i]]], dtype=int)
            score += mu * float(model.score(before, np.array([[token]]))[0, 0])
        found.append((score, path))
    return sorted(found, key=lambda pair: -pair[0])


@pytest.mark.parametrize("order", [None, 1, 2, 3])
@pytest.mark.parametrize("count", [1, 3, 12])
@pytest.mark.parametrize("context", [(), (1,), (4, 2, 5)])
def test_a_beam_that_holds_everything_finds_the_best_of_all_paths(order, count, context):
    model = None if order is None else grams(VOCAB, order=order)
    for seed in range(4):
        tokens, scores = lattice(4, 3, seed)
        found = best_paths(tokens, scores, count=count, beam=999, context=context, model=model, mu=0.7)
        expected = every(tokens, scores, context, model, 0.7)[:count]
        assert np.allclose(found.scores, [score for score, _ in expected])
        assert [tuple(path) for path in found.tokens.tolist()] == [path for _, path in expected]


@pytest.mark.parametrize("beam", [1, 2, 5])
def test_paths_of_a_narrow_beam_differ_and_their_scores_are_those_of_the_formula(beam):
    model = grams(VOCAB)
    for seed in range(4):
        tokens, scores = lattice(5, 4, seed)
        found = best_paths(tokens, scores, count=5, beam=beam, context=(3,), model=model, mu=0.7)
        known = {path: score for score, path in every(tokens, scores, (3,), model, 0.7)}
        paths = [tuple(path) for path in found.tokens.tolist()]
        assert len(set(paths)) == len(paths) == 5
        assert np.allclose(found.scores, [known[path] for path in paths])
        assert (np.diff(found.scores) <= 0).all()


def test_without_a_model_the_best_path_is_the_likeliest_token_of_each_depth():
    tokens, scores = lattice(5, 4, 0)
    for model, mu in ((None, 0.7), (grams(VOCAB), 0.0)):
        found = best_paths(tokens, scores, count=1, beam=64, context=(1, 2), model=model, mu=mu)
        assert found.tokens.tolist() == [tokens[:, 0].tolist()]


def test_rows_behind_prefixes_are_the_law_of_a_drawn_path():
    tokens, scores = lattice(3, 3, 1)
    found = best_paths(tokens, scores, count=7, beam=64, model=grams(VOCAB), mu=1.0)
    weights = np.exp(found.scores)
    for path, weight in zip(found.tokens.tolist(), weights / weights.sum(), strict=True):
        product = 1.0
        for i, token in enumerate(path):
            after, sums = found.behind(path[:i])
            law = np.exp(sums) / np.exp(sums).sum()
            product *= float(law[after.tolist().index(token)])
        assert product == pytest.approx(weight)
    for nowhere in ([5, 5, 5], [VOCAB], found.tokens[0].tolist()):
        assert found.behind(nowhere)[0].tolist() == []
    assert isinstance(found, BestPaths)
