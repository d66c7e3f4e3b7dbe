"""Acceptance of the verifiers is what the papers' formulas give, and published negative vectors are caught."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from outrider.drafters.model import ModelDrafter
from outrider.lm.tabular import TabularLM
from outrider.proof.enumerate import law
from outrider.trees.chain import ChainTree
from outrider.trees.gumbel import GumbelTree
from outrider.trees.iid import IidTree
from outrider.trees.protocol import Children, UnprunedTree
from outrider.trees.top_plus_one import TopPlusOneTree
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.greedy_block import GreedyBlockVerifier
from outrider.verifiers.recursive import RecursiveVerifier
from outrider.verifiers.token import TokenVerifier
from outrider.verifiers.traversal import TraversalVerifier
from tests.world.mislabelled import ChosenAsDrawn, Relabelled, Unmerged
from tests.world.tables import tables, toy
from tests.world.verifiers import verifier

BOUND = 1e-12


# The spec's vectors at one node: q = (.6, .3, .1), p = (.3, .4, .3).

P, Q = np.array([0.3, 0.4, 0.3]), np.array([0.6, 0.3, 0.1])


@dataclass(frozen=True, kw_only=True)
class Sorted(UnprunedTree):
    """A tree whose siblings are put in the order of their own probability."""

    tree: object
    structure: str

    def choose(self, level, dice):
        children = self.tree.choose(level, dice)
        q = level.rows[0][children.tokens].numpy()
        return replace(children, tokens=children.tokens[np.lexsort([-q, children.owners])])


@dataclass(frozen=True, kw_only=True)
class DropsUnlikelySecond(UnprunedTree):
    """Draws two without replacement and drops the second because of its own probability."""

    structure: str = "without_replacement"

    def choose(self, level, dice):
        children = GumbelTree(branching=(2,)).choose(level, dice)
        first = np.arange(len(children.owners)) % 2 == 0
        kept = np.flatnonzero(first | (level.rows[0][children.tokens].numpy() >= 0.25))
        return Children(
            owners=children.owners[kept],
            parents=children.parents[kept],
            tokens=children.tokens[kept],
            expand=children.expand[kept],
        )


def one_node(tree: object, rule: object) -> tuple[float, np.ndarray]:
    """Acceptance and law of one step of depth one."""
    parts = tables(
        3, rule, 1, target=TabularLM(lambda _: P, 3), drafter=ModelDrafter(lm=TabularLM(lambda _: Q, 3)), tree=tree
    )
    found = law(parts, [0], 1)
    first = np.zeros(3)
    for output, mass in found.emitted.items():
        first[output[0]] += mass
    return found.accepted, first


def wor(count: int) -> GumbelTree:
    return GumbelTree(branching=(count,))


RIGHT = [
    (ChainTree(), "token", 0.7),
    (IidTree(num_paths=2), "recursive", 0.82),
    (IidTree(num_paths=3), "recursive", 0.848),
    (IidTree(num_paths=2), "kseq", 0.84),
    (IidTree(num_paths=3), "kseq", 0.875),
    (IidTree(num_paths=2), "match", 0.513),
    (IidTree(num_paths=3), "match", 0.6249),
    (wor(2), "recursive", 0.875),
    (wor(3), "recursive", 1.0),
    (TopPlusOneTree(width=2), "top_plus_one", 0.95),
]


@pytest.mark.parametrize("tree, rule, acceptance", RIGHT)
def test_acceptance_at_one_node_is_what_the_papers_formulas_give(tree, rule, acceptance):
    accepted, first = one_node(tree, verifier(rule))
    assert accepted == pytest.approx(acceptance, abs=1e-12)
    assert np.abs(first - P).max() < BOUND


def as_(structure: str, tree: object) -> Relabelled:
    return Relabelled(tree=tree, structure=structure)


WRONG = {
    "with replacement's rule on draws without": (as_("iid", wor(2)), "recursive", (0.3, 0.525, 0.175)),
    "without replacement's rule on repeated draws": (Unmerged(), "recursive", (0.3, 0.34, 0.36)),
    "de-duplicated draws sorted by q": (
        Sorted(tree=IidTree(num_paths=2, dedup=True), structure="iid_dedup"),
        "recursive",
        (0.42, 0.29, 0.29),
    ),
    "draws without replacement sorted by q": (
        Sorted(tree=wor(2), structure="without_replacement"),
        "recursive",
        (0.462, 0.233, 0.305),
    ),
    "kseq on draws without replacement": (as_("iid", wor(2)), "kseq", (0.219, 0.561, 0.220)),
    "the likeliest two as if drawn": (ChosenAsDrawn(), "recursive", (0.5, 0.222, 0.278)),
    "top and one draw as if drawn": (
        as_("without_replacement", TopPlusOneTree(width=2)),
        "recursive",
        (0.5, 0.167, 0.333),
    ),
    "the second dropped for its probability": (DropsUnlikelySecond(), "recursive", (0.3, 0.425, 0.275)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_negative_vector_is_caught_with_the_law_that_is_known_of_it(name):
    tree, rule, expected = WRONG[name]
    _, first = one_node(tree, verifier(rule))
    assert first == pytest.approx(expected, abs=6e-4)


def test_traversal_is_block_on_a_chain_and_at_least_recursive_on_trees():
    for seed in range(3):
        chain = [law(tables(3, rule, 3, seed), [0], 1).accepted for rule in (BlockVerifier(), TraversalVerifier())]
        assert chain[0] == pytest.approx(chain[1], abs=1e-12)
        tree = GumbelTree(branching=(2, 2))
        below, above = (
            law(tables(3, rule, 2, seed, tree=tree), [0], 1).accepted
            for rule in (RecursiveVerifier(), TraversalVerifier())
        )
        assert above >= below - 1e-12


def test_a_tree_of_width_one_is_the_chain_for_every_rule():
    for seed in range(2):
        for rule, same in (
            ("recursive", TokenVerifier()),
            ("kseq", TokenVerifier()),
            ("top_plus_one", TokenVerifier()),
            ("traversal", BlockVerifier()),
            ("multipath", BlockVerifier()),
        ):
            chain = law(tables(3, same, 3, seed), [0], 1).accepted
            assert law(tables(3, verifier(rule), 3, seed), [0], 1).accepted == pytest.approx(chain, abs=1e-12)


def test_acceptance_never_falls_with_more_draws():
    for seed in range(4):
        for make, rule in (
            (lambda k: IidTree(num_paths=k), "recursive"),
            (lambda k: IidTree(num_paths=k), "kseq"),
            (wor, "recursive"),
        ):
            accepted = [law(tables(3, verifier(rule), 1, seed, tree=make(k)), [0], 1).accepted for k in (1, 2, 3)]
            assert accepted == sorted(accepted)
        assert law(tables(3, RecursiveVerifier(), 1, seed, tree=wor(3)), [0], 1).accepted == pytest.approx(1, abs=1e-12)


def test_greedy_block_gives_most_in_one_block_and_less_than_block_over_three():
    emitted = {
        name: [law(toy(rule), [0], n).accepted + n for n in (1, 2, 3)]
        for name, rule in (("block", BlockVerifier()), ("greedy", GreedyBlockVerifier()))
    }
    assert emitted["block"] == pytest.approx([20 / 9, 40 / 9, 60 / 9], abs=1e-9)
    assert emitted["greedy"] == pytest.approx([21 / 9, 40 / 9, 59 / 9], abs=1e-9)
