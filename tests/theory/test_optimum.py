"""The optimal acceptance against linear programming, brute force and exact counts; what each rule reaches below it."""

import math
from collections.abc import Callable, Iterator
from itertools import chain, combinations, pairwise, permutations, product

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor

import outrider
from outrider import InputError, optimal_acceptance
from outrider.theory.acceptance import (
    kseq_acceptance,
    match_acceptance,
    recursive_with_replacement,
    recursive_without_replacement,
    top_plus_one_acceptance,
)
from outrider.theory.race import Race


def row(probabilities: list[float]) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64)


P, Q = row([0.3, 0.4, 0.3]), row([0.6, 0.3, 0.1])
WITH = [match_acceptance, recursive_with_replacement, kseq_acceptance]


def rows(vocab: int, seed: int, sharp: float = 1.0) -> tuple[Tensor, Tensor]:
    """A random target and draft row; the higher `sharp`, the nearer to one-hot."""
    noise = np.random.default_rng(seed)
    p, q = noise.dirichlet(np.full(vocab, 1 / sharp)), noise.dirichlet(np.full(vocab, 1 / sharp))
    return torch.from_numpy(p), torch.from_numpy(q)


def drafts(q: Tensor, n: int, replacement: bool) -> dict[tuple[int, ...], float]:
    """Every ordered tuple of draws with its probability."""
    weights = q.tolist()
    every = product(range(len(q)), repeat=n) if replacement else permutations(range(len(q)), n)
    law = {}
    for draws in every:
        mass = 1.0
        for i, x in enumerate(draws):
            left = 1.0 if replacement else sum(weights[y] for y in range(len(q)) if y not in draws[:i])
            mass *= weights[x] / left if left else 0.0
        law[draws] = mass
    return law


def by_linear_program(p: Tensor, law: dict[tuple[int, ...], float]) -> float:
    """The most mass on outputs within the drafted tuple, by a general solver; the rest couples in any way."""
    vocab, tuples = len(p), list(law)
    reward = np.array([[-float(x in draws) for draws in tuples] for x in range(vocab)])
    outputs = np.kron(np.eye(vocab), np.ones(len(tuples)))
    drafted = np.kron(np.ones(vocab), np.eye(len(tuples)))
    sides = np.concatenate([p.numpy(), list(law.values())])
    found = linprog(reward.ravel(), A_ub=np.vstack([outputs, drafted]), b_ub=sides, method="highs")
    assert found.success, found.message
    return -found.fun


def by_subsets(p: Tensor, law: dict[tuple[int, ...], float]) -> float:
    """The dual, over every set of tokens."""
    tokens = range(len(p))
    every = chain.from_iterable(combinations(tokens, k) for k in range(len(p) + 1))
    return 1 + min(
        sum(float(p[x]) for x in inside) - sum(mass for draws, mass in law.items() if set(draws) <= set(inside))
        for inside in every
    )


def toys() -> Iterator[tuple[Tensor, Tensor]]:
    for vocab in (4, 5):
        for seed in range(6):
            yield rows(vocab, seed, sharp=(1, 3)[seed % 2])


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_linear_program_every_set_and_sorted_prefixes_agree(n, replacement):
    for p, q in toys():
        law = drafts(q, n, replacement)
        found = float(optimal_acceptance(p, q, n, replacement))
        assert found == pytest.approx(by_subsets(p, law), abs=1e-11)
        assert found == pytest.approx(by_linear_program(p, law), abs=1e-6)


@pytest.mark.parametrize("replacement", [True, False])
def test_zeros_in_either_row_agree_with_every_set(replacement):
    p, q = row([0.0, 0.2, 0.3, 0.1, 0.4]), row([0.5, 0.0, 0.3, 0.2, 0.0])
    for n in (1, 2, 3):
        expected = by_subsets(p, drafts(q, n, replacement))
        assert float(optimal_acceptance(p, q, n, replacement)) == pytest.approx(expected, abs=1e-11)
    # Three tokens can be drafted; a fourth draw without replacement finds none.
    assert float(optimal_acceptance(p, q, 4, replacement=False)) == pytest.approx(0.4, abs=1e-12)


@pytest.mark.parametrize(
    "rule, n, expected",
    [
        (lambda p, q, n: optimal_acceptance(p, q, n, replacement=True), 1, 0.7),
        (lambda p, q, n: optimal_acceptance(p, q, n, replacement=True), 2, 0.89),
        (lambda p, q, n: optimal_acceptance(p, q, n, replacement=True), 3, 0.971),
        (lambda p, q, n: optimal_acceptance(p, q, n, replacement=False), 1, 0.7),
        (lambda p, q, n: optimal_acceptance(p, q, n, replacement=False), 2, 0.9 + 0.65 / 7),
        (lambda p, q, n: optimal_acceptance(p, q, n, replacement=False), 3, 1.0),
        (recursive_with_replacement, 2, 0.82),
        (recursive_with_replacement, 3, 0.848),
        (kseq_acceptance, 2, 0.84),
        (kseq_acceptance, 3, 0.875),
        (match_acceptance, 2, 0.513),
        (match_acceptance, 3, 0.6249),
        (recursive_without_replacement, 2, 0.875),
        (recursive_without_replacement, 3, 1.0),
        (top_plus_one_acceptance, 2, 0.95),
    ],
)
def test_three_tokens_give_the_known_numbers(rule, n, expected):
    assert float(rule(P, Q, n)) == pytest.approx(expected, abs=1e-10)


def test_no_rule_passes_the_optimum_of_its_draws():
    for seed in range(40):
        p, q = rows(3 + seed % 5, seed, sharp=1 + seed % 3)
        for n in (1, 2, 3):
            best = float(optimal_acceptance(p, q, n, replacement=True))
            for rule in WITH:
                assert float(rule(p, q, n)) <= best + 1e-12, (rule.__name__, seed, n)
            # K-SEQ keeps at least this share of the optimum, whatever the rows.
            assert float(kseq_acceptance(p, q, n)) >= (1 - 1 / math.e) * best
            best = float(optimal_acceptance(p, q, n, replacement=False))
            assert float(recursive_without_replacement(p, q, n)) <= best + 1e-11, (seed, n)


def test_one_draw_gives_one_minus_total_variation_to_all_but_match():
    for p, q in toys():
        both = [optimal_acceptance(p, q, 1, replacement) for replacement in (True, False)]
        rules = [recursive_with_replacement, kseq_acceptance, recursive_without_replacement, top_plus_one_acceptance]
        for found in both + [rule(p, q, 1) for rule in rules]:
            assert float(found) == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-12)


def test_more_draws_never_hurt_and_without_replacement_is_no_worse_on_toys():
    for p, q in toys():
        for rule in (*WITH, recursive_without_replacement, top_plus_one_acceptance):
            found = [float(rule(p, q, n)) for n in range(1, len(p) + 2)]
            if rule is not top_plus_one_acceptance:
                assert all(a <= b + 1e-12 for a, b in pairwise(found)), rule.__name__
        drawn = [[float(optimal_acceptance(p, q, n, r)) for n in range(1, len(p) + 2)] for r in (True, False)]
        for found in drawn:
            assert all(a <= b + 1e-11 for a, b in pairwise(found))
        assert all(a <= b + 1e-11 for a, b in zip(*drawn, strict=True))
        assert drawn[1][-1] == pytest.approx(1, abs=1e-12)


def test_equal_rows_accept_always_and_disjoint_rows_never():
    p, q = torch.tensor([0.5, 0.5, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.75, 0.25])
    optima = [lambda p, q, n, r=r: optimal_acceptance(p, q, n, replacement=r) for r in (True, False)]
    for rule in (*optima, kseq_acceptance, recursive_with_replacement, recursive_without_replacement):
        for n in (1, 2, 3):
            assert float(rule(p, q, n)) == 0
            assert float(rule(q, q, n)) == pytest.approx(1, abs=1e-12)


def test_top_plus_one_is_the_optimum_of_its_own_draws():
    for p, q in toys():
        for n in (2, 3):
            top = q.topk(n - 1).indices.tolist()
            others = [x for x in range(len(q)) if x not in top]
            mass = float(q[others].sum())
            law = {(*top, x): float(q[x]) / mass for x in others}
            assert float(top_plus_one_acceptance(p, q, n)) == pytest.approx(by_subsets(p, law), abs=1e-12)


def follow(p: list[float], q: list[float], draws: tuple[int, ...]) -> float:
    """Recursive rejection along one tuple of draws, straight from the rule; the probability that none is accepted."""
    refused = 1.0
    for x in draws:
        total = sum(q)
        q = [w / total for w in q]
        refused *= 1 - min(1, p[x] / q[x])
        left = [max(a - b, 0) for a, b in zip(p, q, strict=True)]
        p = [w / sum(left) for w in left] if sum(left) else p
        q = [0 if y == x else w for y, w in enumerate(q)]
    return refused


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_recursive_rejection_without_replacement_equals_every_tuple_followed(n):
    for p, q in toys():
        refused = sum(mass * follow(p.tolist(), q.tolist(), draws) for draws, mass in drafts(q, n, False).items())
        assert float(recursive_without_replacement(p, q, n)) == pytest.approx(1 - refused, abs=1e-12)


def test_recursive_rejection_sees_a_target_outside_of_the_draft_support():
    p, q = row([0.1, 0.2, 0.3, 0.4]), row([0.6, 0.3, 0.1, 0.0])
    for n in (2, 3):
        refused = sum(mass * follow(p.tolist(), q.tolist(), d) for d, mass in drafts(q, n, False).items() if mass)
        assert float(recursive_without_replacement(p, q, n)) == pytest.approx(1 - refused, abs=1e-12)
    assert float(recursive_without_replacement(p, q, 9)) == pytest.approx(float(recursive_without_replacement(p, q, 3)))


@pytest.mark.parametrize("n", [2, 3, 5, 8, 20])
def test_a_uniform_row_gives_the_hypergeometric_law(n):
    vocab = 2000
    race = Race.of(np.full(vocab, 1 / vocab), n)
    prefixes = np.unique(np.linspace(0, vocab, 60).astype(int))
    expected = [1 - math.comb(int(k), n) / math.comb(vocab, n) for k in prefixes]
    np.testing.assert_allclose(race.escape(prefixes), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("sharp", [1.0, 30.0, 1000.0])
def test_race_equals_direct_sums_on_rows_with_heavy_and_small_tokens(sharp):
    vocab = 400
    q = np.maximum(rows(vocab, 3, sharp)[1].numpy(), 1e-12)
    q /= q.sum()
    race = {n: Race.of(q, n) for n in (2, 3)}
    pair = q[:, None] * q / (1 - q[:, None])
    np.fill_diagonal(pair, 0)
    rest = 1 - q[:, None] - q
    for k in (0, 1, 2, 50, 200, 399, 400):
        two = pair[:k, :k]
        three = two * (q[:k].sum() - q[:k, None] - q[:k]) / rest[:k, :k]
        found = [float(race[n].escape(np.array([k]))[0]) for n in (2, 3)]
        assert found == pytest.approx([1 - two.sum(), 1 - three.sum()], abs=1e-9), k


def test_rows_peaked_beyond_rounding_keep_their_digits():
    tiny = 1e-25
    q = np.array([1.0, 0.6 * tiny, 0.3 * tiny, 0.1 * tiny])
    # After the certain first token the second is drawn from (.6, .3, .1).
    for n in (2, 3):
        found = Race.of(q, n).escape(np.arange(5))
        expected = [1, 1, 0.4, 0.1, 0] if n == 2 else [1, 1, 1, 1 - 0.6 * 0.75 - 0.3 * 0.6 / 0.7, 0]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_the_search_finds_the_least_of_all_prefixes():
    p, q = rows(20_000, 8, sharp=5.0)
    q = q.clamp_min(1e-15)
    q = q / q.sum()
    order = np.argsort((p / q).numpy())
    inside = np.concatenate([[0.0], np.cumsum(p.numpy()[order])])
    every = inside + Race.of(q.numpy()[order], 3).escape(np.arange(len(q) + 1))
    assert float(optimal_acceptance(p, q, 3, replacement=False)) == pytest.approx(every.min(), abs=1e-9)


def test_batches_are_computed_row_by_row_in_float64():
    p, q = (torch.stack(side).reshape(2, 3, 4) for side in zip(*(rows(4, s) for s in range(6)), strict=True))
    rules: list[Callable[..., Tensor]] = [*WITH, recursive_without_replacement, top_plus_one_acceptance]
    rules += [lambda p, q, n, r=r: optimal_acceptance(p, q, n, replacement=r) for r in (True, False)]
    for rule in rules:
        found = rule(p.float(), q.float(), 2)
        assert found.shape == (2, 3)
        assert found.dtype == torch.float64
        for i, j in product(range(2), range(3)):
            assert float(found[i, j]) == pytest.approx(float(rule(p[i, j], q[i, j], 2)), abs=1e-6)
        assert rule(p[:0], q[:0], 2).shape == (0, 3)


@pytest.mark.parametrize(
    "p, q, n, said",
    [
        (P, Q, 0, "n must be >= 1 .* got 0"),
        (P, Q[:2], 1, r"one shape, got \(3,\) and \(2,\)"),
        (P, 2 * Q, 1, "draft_probs must sum to 1, got one that is off by 1"),
        (torch.tensor([1.5, -0.5, 0.0]), Q.float(), 1, "target_probs must be probabilities"),
        (torch.tensor([math.nan, 0.5, 0.5]), Q.float(), 1, "target_probs must be probabilities"),
        (P.half(), Q.half(), 1, "float32 or float64, got torch.float16"),
    ],
)
def test_wrong_input_is_refused_with_what_to_do(p, q, n, said):
    with pytest.raises(InputError, match=said):
        optimal_acceptance(p, q, n, replacement=True)
    with pytest.raises(InputError, match=said):
        kseq_acceptance(p, q, n)


def test_too_many_branches_are_refused():
    p, q = rows(400, 0)
    with pytest.raises(InputError, match="cut the rows by top-k"):
        recursive_without_replacement(p, q, 4)


def test_the_optimum_is_a_public_name():
    assert outrider.optimal_acceptance is optimal_acceptance
