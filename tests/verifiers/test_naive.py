"""The oracles keep the laws they claim: enumerated on tiny trees, against published toys, and biased where misused."""

from collections import defaultdict
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from numpy.testing import assert_allclose

from tests.verifiers import naive_trees
from tests.verifiers.choices import Choices
from tests.verifiers.draft_law import (
    Forest,
    Model,
    Prefix,
    Rule,
    Siblings,
    drawn,
    first_appearances,
    fixed,
    grown,
    iid_paths,
    law,
    likeliest,
    likelihood,
    models,
    random_model,
    rearranged,
    top_then_one,
    tree_of,
    without_replacement,
)
from tests.verifiers.naive_greedy_block import greedy_block_once
from tests.verifiers.naive_trees import Tree

BOUND = 1e-12
P3, Q3 = fixed([0.3, 0.4, 0.3]), fixed([0.6, 0.3, 0.1])
TOY_P, TOY_Q = fixed([1 / 3, 2 / 3]), fixed([2 / 3, 1 / 3])
with_replacement, without = naive_trees.recursive_with_replacement, naive_trees.recursive_without_replacement


def one_node(siblings: Callable[[np.ndarray], Siblings], rule: Rule) -> tuple[float, np.ndarray]:
    """Acceptance and law of the first token for the rows of the multi-candidate example."""
    found = law(grown(P3, Q3, siblings, 1), rule)
    first = np.zeros(3)
    for tokens, mass in found.emitted.items():
        first[tokens[0]] += mass
    return found.accepted, first


def by_q(q: np.ndarray, names: Prefix) -> Prefix:
    return tuple(sorted(names, key=lambda x: -q[x]))


def without_unlikely_second(q: np.ndarray, names: Prefix) -> Prefix:
    return names if q[names[1]] >= 0.25 else names[:1]


@pytest.mark.parametrize(
    ("siblings", "rule", "acceptance"),
    [
        pytest.param(drawn(1), naive_trees.token, 0.7, id="token"),
        pytest.param(drawn(2), with_replacement, 0.82, id="recursive-iid-2"),
        pytest.param(drawn(3), with_replacement, 0.848, id="recursive-iid-3"),
        pytest.param(drawn(2), naive_trees.kseq, 0.84, id="kseq-2"),
        pytest.param(drawn(3), naive_trees.kseq, 0.875, id="kseq-3"),
        pytest.param(drawn(2), naive_trees.match, 0.513, id="match-2"),
        pytest.param(drawn(3), naive_trees.match, 0.6249, id="match-3"),
        pytest.param(without_replacement(2), without, 0.875, id="recursive-2"),
        pytest.param(without_replacement(3), without, 1.0, id="recursive-3"),
        pytest.param(without_replacement(2), naive_trees.traversal, 0.875, id="traversal-2"),
        pytest.param(top_then_one(2), naive_trees.top_plus_one, 0.95, id="top-plus-one"),
    ],
)
def test_acceptance_at_one_node_is_the_published_one_and_the_law_is_kept(siblings, rule, acceptance):
    found, first = one_node(siblings, rule)
    assert_allclose(found, acceptance, atol=BOUND)
    assert_allclose(first, P3(()), atol=BOUND)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_top_plus_one_is_match_where_the_top_leaves_nothing_to_draw(count):
    p, q = fixed([0.3, 0.3, 0.2, 0.2]), fixed([0.6, 0.4, 0.0, 0.0])
    drafts = grown(p, q, top_then_one(count), 2)
    found = law(drafts, naive_trees.top_plus_one)
    assert found.error(p) < BOUND
    assert_allclose(found.accepted, law(drafts, naive_trees.match).accepted)


def test_kseq_scales_by_the_published_rho():
    assert_allclose([naive_trees.solve_rho(P3(()), Q3(()), k) for k in (1, 2, 3)], [1, 1.4, 1.75], atol=BOUND)


@pytest.mark.parametrize(
    ("siblings", "rule", "biased"),
    [
        pytest.param(without_replacement(2), with_replacement, (0.3, 0.525, 0.175), id="with-replacement rule"),
        pytest.param(drawn(2), without, (0.3, 0.34, 0.36), id="repeats"),
        pytest.param(
            rearranged(rearranged(drawn(2), first_appearances), by_q), without, (0.42, 0.29, 0.29), id="iid sorted by q"
        ),
        pytest.param(rearranged(without_replacement(2), by_q), without, (0.462, 0.233, 0.305), id="sorted by q"),
        pytest.param(without_replacement(2), naive_trees.kseq, (0.219, 0.561, 0.220), id="kseq on distinct draws"),
        pytest.param(likeliest(2), without, (0.5, 0.222, 0.278), id="top two taken for draws"),
        pytest.param(top_then_one(2), without, (0.5, 0.167, 0.333), id="top and one taken for draws"),
        pytest.param(
            rearranged(without_replacement(2), without_unlikely_second), without, (0.3, 0.425, 0.275), id="pruned by q"
        ),
        pytest.param(likeliest(2), naive_trees.traversal, (0.5, 0.222, 0.278), id="traversal of the top two"),
    ],
)
def test_a_rule_on_drafts_of_another_law_is_biased_as_published(siblings, rule, biased):
    _, first = one_node(siblings, rule)
    assert_allclose(first, biased, atol=6e-4)
    assert np.abs(first - P3(())).max() > 0.02


def test_the_second_sibling_is_judged_by_what_the_first_one_left():
    asked = []

    class Refusing:
        def coin(self, probability: float, slot: int) -> bool:
            asked.append(probability)
            return False

        def pick(self, weights: np.ndarray, slot: int) -> int:
            return int(weights.argmax())

    without(tree_of({(): (0, 1)}, P3, Q3), Refusing())
    assert_allclose(asked, [0.5, 4 / 9])


TREES: dict[str, tuple[Callable[[Model, Model], Forest], list[Rule]]] = {
    "chain of three": (
        lambda p, q: grown(p, q, drawn(1), 3),
        [
            naive_trees.token,
            naive_trees.block,
            naive_trees.match,
            with_replacement,
            without,
            naive_trees.kseq,
            naive_trees.top_plus_one,
            naive_trees.traversal,
            naive_trees.multipath,
        ],
    ),
    "two by two without replacement": (
        lambda p, q: grown(p, q, without_replacement(2), 2),
        [naive_trees.match, without, naive_trees.traversal, naive_trees.token, naive_trees.block],
    ),
    "two by two drawn and de-duplicated at every node": (
        lambda p, q: grown(p, q, rearranged(drawn(2), first_appearances), 2),
        [naive_trees.match, without, naive_trees.traversal],
    ),
    "two iid paths of three": (
        lambda p, q: iid_paths(p, q, 2, 3, deduplicated=False),
        [naive_trees.match, with_replacement, naive_trees.kseq, naive_trees.multipath, naive_trees.block],
    ),
    "three iid paths of two": (
        lambda p, q: iid_paths(p, q, 3, 2, deduplicated=False),
        [naive_trees.match, with_replacement, naive_trees.kseq, naive_trees.multipath, naive_trees.token],
    ),
    "two iid paths of three, de-duplicated": (
        lambda p, q: iid_paths(p, q, 2, 3, deduplicated=True),
        [naive_trees.match, without, naive_trees.traversal],
    ),
    "three iid paths of two, de-duplicated": (
        lambda p, q: iid_paths(p, q, 3, 2, deduplicated=True),
        [naive_trees.match, without, naive_trees.traversal],
    ),
    "top one and one draw, twice": (
        lambda p, q: grown(p, q, top_then_one(2), 2),
        [naive_trees.match, naive_trees.top_plus_one],
    ),
    "top two and the rest": (
        lambda p, q: grown(p, q, top_then_one(3), 2),
        [naive_trees.match, naive_trees.top_plus_one],
    ),
    "chosen two by two": (lambda p, q: grown(p, q, likeliest(2), 2, chosen=True), [naive_trees.match, without]),
    "chosen chain of three": (
        lambda p, q: grown(p, q, likeliest(1), 3, chosen=True),
        [naive_trees.token, naive_trees.block, naive_trees.match, with_replacement, without, naive_trees.traversal],
    ),
    "nothing": (
        lambda p, q: [(tree_of({}, p, q), 1.0)],
        [naive_trees.token, naive_trees.block, naive_trees.match, with_replacement, naive_trees.traversal],
    ),
}


@cache
def forest(name: str, seed: int) -> tuple[Model, Forest]:
    p, q = models(3, seed)
    return p, TREES[name][0](p, q)


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("seed", [0, 1, 100, 101])
def test_every_lossless_rule_keeps_the_joint_law_of_all_emitted_tokens(name, seed):
    p, drafts = forest(name, seed)
    assert_allclose(sum(mass for _, mass in drafts), 1, atol=BOUND)
    for rule in TREES[name][1]:
        assert law(drafts, rule).error(p) < BOUND, rule


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("two by two without replacement", with_replacement),
        ("two by two without replacement", naive_trees.kseq),
        ("two iid paths of three", without),
        ("three iid paths of two", without),
        ("top one and one draw, twice", without),
        ("top one and one draw, twice", naive_trees.traversal),
    ],
)
def test_a_rule_in_a_refused_cell_of_the_matrix_fails_the_joint_law(name, rule):
    p, drafts = forest(name, 0)
    assert law(drafts, rule).error(p) > 1e-4


def test_a_chosen_tree_taken_for_a_drawn_one_fails_the_joint_law():
    p, q = models(3, 0)
    for rule in (without, naive_trees.traversal, naive_trees.token, naive_trees.block):
        assert law(grown(p, q, likeliest(2), 2), rule).error(p) > 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_on_a_chain_multi_candidate_rules_are_the_token_rule_and_leaf_first_rules_the_block_rule(seed):
    p, q = models(3, seed)
    chain = grown(p, q, drawn(1), 3)
    singles = (with_replacement, without, naive_trees.kseq, naive_trees.top_plus_one)
    for rules, base in (
        (singles, naive_trees.token),
        ((naive_trees.traversal, naive_trees.multipath), naive_trees.block),
    ):
        expected = law(chain, base).emitted
        for rule in rules:
            found = law(chain, rule).emitted
            assert_allclose([found.get(tokens, 0) for tokens in expected], list(expected.values()), atol=BOUND)


def test_a_toy_block_of_two_accepts_as_published():
    chain = grown(TOY_P, TOY_Q, drawn(1), 2)
    assert_allclose(law(chain, naive_trees.token).accepted, 10 / 9)
    assert_allclose(law(chain, naive_trees.block).accepted, 11 / 9)
    assert_allclose(law(chain, greedy_block_once).accepted, 12 / 9)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_acceptance_of_chain_rules_has_its_closed_form(seed, gamma):
    p, q = models(3, seed)
    chain = grown(p, q, drawn(1), gamma)
    by_rule = {"token": 0.0, "block": 0.0, "greedy_block": 0.0}
    for tree, mass in chain:
        tokens, sums = tree.tokens[1:], [0.0]
        steps = [float(np.log(tree.p[i, x] / tree.q[i, x])) for i, x in enumerate(tokens)]
        for i, step in enumerate(steps, 1):
            sums.append(sums[-1] + step)
            by_rule["token"] += mass * float(np.prod(np.minimum(1, np.exp(steps[:i]))))
            by_rule["block"] += mass * float(np.exp(sums[i] - max(sums)))
            by_rule["greedy_block"] += mass * min(1.0, float(np.exp(sums[i])))
    found = {
        "token": law(chain, naive_trees.token).accepted,
        "block": law(chain, naive_trees.block).accepted,
        "greedy_block": law(chain, greedy_block_once).accepted,
    }
    assert_allclose(list(found.values()), list(by_rule.values()), atol=BOUND)
    assert found["token"] <= found["block"] + BOUND
    assert found["block"] <= found["greedy_block"] + BOUND


def test_match_on_chosen_trees_accepts_the_targets_probability_of_the_drafted_paths():
    p, drafts = forest("chosen two by two", 0)
    ((tree, _),) = drafts
    nodes = range(1, len(tree.tokens))
    expected = sum(likelihood(p, (), tuple(naive_trees.path_to(tree, node))) for node in nodes)
    assert_allclose(law(drafts, naive_trees.match).accepted, expected)


@pytest.mark.parametrize("seed", range(3))
def test_traversal_accepts_no_less_than_recursive_rejection_on_two_by_two_trees(seed):
    p, q = models(3, seed)
    drafts = grown(p, q, without_replacement(2), 2)
    assert law(drafts, naive_trees.traversal).accepted >= law(drafts, without).accepted - BOUND


def clipped(p: np.ndarray, q: np.ndarray) -> list[int]:
    """Ratios clipped at 1, so that many tie; ties by token id."""
    return sorted(range(len(p)), key=lambda x: (naive_trees.ratio(p[x], q[x]), x))


def multipath_with_ties(tree: Tree, dice: Choices) -> list[int]:
    """Multi-path block verification that ranks by clipped ratios and takes the first drawn of tied children."""
    path = [0]
    while links := tree.children[path[-1]]:
        p, q = tree.p[path[-1]], tree.q[path[-1]]
        path.append(max(links, key=lambda child: naive_trees.ratio(p[tree.tokens[child]], q[tree.tokens[child]])))
    rows = naive_trees.skewed(tree, path, clipped)
    return naive_trees.block_along(tree, path, rows, dice, list(range(len(path))))


@pytest.mark.parametrize("name", ["two iid paths of three", "three iid paths of two"])
def test_multipath_is_biased_where_the_walk_breaks_ties_otherwise_than_the_law(name):
    p, drafts = forest(name, 0)
    assert law(drafts, multipath_with_ties).error(p) > 1e-3


def test_multipath_keeps_the_law_where_all_ratios_tie():
    q = random_model(3, 6)
    drafts = iid_paths(q, q, 2, 2, deduplicated=False)
    assert law(drafts, naive_trees.multipath).error(q) < BOUND


def test_multipath_skews_by_the_law_of_the_best_path():
    p, q = models(3, 4)
    found: dict[Prefix, float] = defaultdict(float)
    told: dict[Prefix, float] = {}
    for tree, mass in iid_paths(p, q, 3, 2, deduplicated=False):
        path = [0]
        while links := tree.children[path[-1]]:
            order = naive_trees.rank_by_ratio(tree.p[path[-1]], tree.q[path[-1]])
            path.append(max(links, key=lambda child: order.index(tree.tokens[child])))
        tokens = tuple(tree.tokens[node] for node in path[1:])
        rows = naive_trees.skewed(tree, path, naive_trees.rank_by_ratio)
        found[tokens] += mass
        told[tokens] = float(np.prod([row[x] for row, x in zip(rows, tokens, strict=True)]))
    assert_allclose([told[tokens] for tokens in found], list(found.values()), atol=BOUND)
