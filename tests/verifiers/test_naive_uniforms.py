"""The oracles over a greedy target, at uniforms of zero, and by many uniforms."""

from collections import defaultdict
from functools import partial

import numpy as np
import pytest

from tests.verifiers import naive_lossy, naive_trees
from tests.verifiers.choices import Numbers, outcomes
from tests.verifiers.draft_law import (
    Prefix,
    Rule,
    drawn,
    fixed,
    grown,
    models,
    random_model,
    top_then_one,
    tree_of,
    without_replacement,
)
from tests.verifiers.naive_greedy_block import greedy_block_once
from tests.verifiers.naive_trees import Tree

BOUND = 1e-12
with_replacement, without = naive_trees.recursive_with_replacement, naive_trees.recursive_without_replacement


@pytest.mark.parametrize(
    ("siblings", "rules"),
    [
        (drawn(1), [naive_trees.token, naive_trees.block, naive_trees.kseq, naive_trees.multipath]),
        (without_replacement(2), [without, naive_trees.traversal, naive_trees.match]),
        (top_then_one(2), [naive_trees.top_plus_one]),
    ],
)
def test_a_greedy_target_makes_every_rule_follow_its_argmax(siblings, rules):
    for tree, _ in grown(fixed([0.0, 1.0, 0.0]), random_model(3, 5), siblings, 2):
        node, expected = 0, [1]
        while hits := [child for child in tree.children[node] if tree.tokens[child] == 1]:
            node, expected = hits[0], [*expected, 1]
        for rule in rules:
            assert decisions(tree, rule) == {tuple(expected): 1.0}


def decisions(tree: Tree, rule: Rule) -> dict[Prefix, float]:
    return outcomes(lambda dice: tuple(rule(tree, dice)))


def test_a_zero_uniform_never_accepts_a_token_of_probability_zero():
    p, q = fixed([0.0, 0.5, 0.5]), fixed([0.8, 0.1, 0.1])
    zeros = Numbers(accept=lambda slot: 0.0, recover=lambda slot: 0.0)
    chain = tree_of({(): (0,), (0,): (1,)}, p, q)
    for rule in (
        naive_trees.token,
        naive_trees.block,
        naive_trees.match,
        with_replacement,
        without,
        naive_trees.kseq,
        naive_trees.top_plus_one,
        naive_trees.traversal,
        naive_trees.multipath,
        naive_lossy.typical,
        partial(naive_lossy.lenient, lenience=0.01),
        partial(naive_lossy.f_exp, epsilon=0.01),
        greedy_block_once,
    ):
        assert rule(chain, zeros) == [1]


def test_uniforms_reproduce_the_enumerated_law():
    p, q = models(3, 11)
    tree = tree_of({(): (2, 0), (2,): (1, 0), (0,): (0, 2)}, p, q)
    random, count = np.random.default_rng(1), 20_000
    seen: dict[Prefix, int] = defaultdict(int)
    for numbers in random.random((count, 7)):
        choices = Numbers(accept=lambda slot, u=numbers: u[slot], recover=lambda slot, u=numbers: u[6])
        seen[tuple(naive_trees.traversal(tree, choices))] += 1
    exact = outcomes(lambda dice: tuple(naive_trees.traversal(tree, dice)))
    assert set(seen) <= set(exact)
    for tokens, mass in exact.items():
        assert abs(seen[tokens] / count - mass) < 5 * np.sqrt(mass * (1 - mass) / count) + BOUND
