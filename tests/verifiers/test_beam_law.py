"""The law of stochastic beam trees against brute force and sampling, and of what is verified over them."""

from collections import defaultdict
from itertools import permutations

import numpy as np
import pytest
from numpy.testing import assert_allclose

from tests.verifiers import naive_trees
from tests.verifiers.beam_law import Levels, beam_trees, children, show
from tests.verifiers.draft_law import Prefix, law, likelihood, models, random_model, tree_of, without_replacement

BOUND = 1e-12


@pytest.mark.parametrize(
    ("vocab", "depth", "width"), [(3, 2, 2), (3, 2, 3), (2, 3, 3), (4, 2, 2), (3, 3, 2), (3, 2, 1)]
)
def test_beam_trees_are_a_law_whose_first_level_is_drawn_without_replacement(vocab, depth, width):
    q = random_model(vocab, 21)
    trees = beam_trees(q, vocab, depth, width)
    assert_allclose(sum(trees.values()), 1, atol=BOUND)
    first: dict[Prefix, float] = defaultdict(float)
    for levels, mass in trees.items():
        assert [len(level) for level in levels] == [min(width, vocab**length) for length in range(1, depth + 1)]
        first[children(levels)[()]] += mass
    expected = without_replacement(width)(q(()))
    assert first.keys() == expected.keys()
    assert_allclose([first[names] for names in expected], list(expected.values()), atol=BOUND)


@pytest.mark.parametrize(("vocab", "depth", "width"), [(2, 2, 2), (2, 2, 3), (2, 3, 2)])
def test_beam_trees_equal_those_of_all_orders_of_all_leaves(vocab, depth, width):
    q = random_model(vocab, 22)
    leaves = {leaf: likelihood(q, (), leaf) for leaf in np.ndindex(*(vocab,) * depth)}
    found: dict[Levels, float] = defaultdict(float)
    for order in permutations(leaves):
        levels: Levels = ((),) * depth
        mass, left = 1.0, sum(leaves.values())
        for leaf in order:
            mass *= leaves[leaf] / left if left > leaves[leaf] else 1.0
            left -= leaves[leaf]
            levels = show(levels, leaf, width)
        found[levels] += mass
    trees = beam_trees(q, vocab, depth, width)
    assert trees.keys() == found.keys()
    assert_allclose([trees[levels] for levels in found], list(found.values()), atol=1e-9)


def test_beam_trees_are_those_of_top_down_sampling():
    """The recursion that a drafter runs: children's noise conditioned on the largest being the parent's."""
    q, width, count = random_model(3, 23), 2, 20_000
    random = np.random.default_rng(3)
    seen: dict[Levels, int] = defaultdict(int)
    for _ in range(count):
        beam: list[tuple[Prefix, float, float]] = [((), 0.0, 0.0)]
        levels: list[tuple[Prefix, ...]] = []
        for _ in range(2):
            candidates = []
            for prefix, phi, value in beam:
                phis = phi + np.log(q(prefix))
                noisy = phis + random.gumbel(size=3)
                # Truncated Gumbels: exp(-v) is shifted so that the largest noise lands on the parent's value.
                lowered = -np.log(np.exp(-value) - np.exp(-noisy.max()) + np.exp(-noisy))
                candidates += [((*prefix, x), float(phis[x]), float(lowered[x])) for x in range(3)]
            beam = sorted(candidates, key=lambda item: -item[2])[:width]
            levels.append(tuple(prefix for prefix, _, _ in beam))
        seen[tuple(levels)] += 1
    trees = beam_trees(q, 3, 2, width)
    assert set(seen) <= set(trees)
    for levels, mass in trees.items():
        assert abs(seen[levels] / count - mass) < 5 * np.sqrt(mass * (1 - mass) / count) + 1e-4


@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize("rule", [naive_trees.recursive_without_replacement, naive_trees.traversal, naive_trees.match])
def test_rules_for_draws_without_replacement_keep_the_law_over_beam_trees(width, rule):
    p, q = models(3, 31)
    drafts = [(tree_of(children(levels), p, q), mass) for levels, mass in beam_trees(q, 3, 2, width).items()]
    assert any(len(links) != width for tree, _ in drafts for links in tree.children[: 1 + width])
    assert law(drafts, rule).error(p) < BOUND


def test_beam_trees_with_siblings_in_another_order_fail_the_law():
    p, q = models(3, 31)
    drafts = [
        (tree_of({prefix: names[::-1] for prefix, names in children(levels).items()}, p, q), mass)
        for levels, mass in beam_trees(q, 3, 2, 2).items()
    ]
    for rule in (naive_trees.recursive_without_replacement, naive_trees.traversal):
        assert law(drafts, rule).error(p) > 1e-3
