"""The lossy oracles give up the law for acceptance, by as much as they claim."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

from tests.verifiers import naive_lossy
from tests.verifiers.choices import outcomes
from tests.verifiers.draft_law import Law, Model, drawn, fixed, grown, law, models, tree_of

BOUND = 1e-12


def distance(p: Model, found: Law) -> float:
    """Total variation of the first token from the target."""
    first = np.zeros(len(p(())))
    for tokens, mass in found.emitted.items():
        first[tokens[0]] += mass
    return float(np.abs(first - p(())).sum() / 2)


@pytest.mark.parametrize("rule", [naive_lossy.lenient, naive_lossy.f_lin, naive_lossy.f_sq, naive_lossy.f_exp])
def test_lenient_rules_trade_the_law_for_acceptance_and_are_lossless_at_one(rule):
    p, q = models(6, 7)
    laws = [
        law(grown(p, q, drawn(1), 1), lambda tree, dice, e=e: rule(tree, dice, e)) for e in (0.1, 0.3, 0.5, 0.8, 1.0)
    ]
    accepted, distances = [found.accepted for found in laws], [distance(p, found) for found in laws]
    assert accepted == sorted(accepted, reverse=True)
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < BOUND < 0.01 < distances[0]


@pytest.mark.parametrize("lenience", [0.3, 0.6])
def test_no_token_becomes_likelier_than_the_lenience_allows_and_some_reach_it(lenience):
    p, q = fixed([0.1, 0.5, 0.4]), fixed([0.7, 0.2, 0.1])
    found = law(grown(p, q, drawn(1), 1), lambda tree, dice: naive_lossy.lenient(tree, dice, lenience))
    first = np.zeros(3)
    for tokens, mass in found.emitted.items():
        first[tokens[0]] += mass
    assert_allclose((first / p(())).max(), 1 / lenience, atol=BOUND)


def test_typical_acceptance_keeps_the_longest_path_that_is_likely_enough():
    uniform, peaked = np.full(4, 0.25), np.array([0.91, 0.04, 0.04, 0.01])
    p: Model = lambda prefix: {(): uniform, (1,): peaked, (2,): peaked}.get(prefix, np.eye(4)[3])  # noqa: E731
    tree = tree_of({(): (1, 2, 3), (1,): (1,), (2,): (0,), (3,): (0,)}, p, p, chosen=True)
    # ln 4 nats: the threshold is 0.3 / 4 and all three first tokens pass; 0.41 nats: it is 0.09, and 0.04 fails.
    assert outcomes(lambda dice: tuple(naive_lossy.typical(tree, dice))) == {(2, 0, 3): 1.0}
    shorter = tree_of({(): (1, 2), (1,): (1,)}, p, p, chosen=True)
    assert set(outcomes(lambda dice: tuple(naive_lossy.typical(shorter, dice)))) == {(1, x) for x in range(4)}
    greedy = tree_of({(): (1, 2)}, fixed(np.eye(4)[2]), p, chosen=True)
    assert outcomes(lambda dice: tuple(naive_lossy.typical(greedy, dice))) == {(2, 2): 1.0}
