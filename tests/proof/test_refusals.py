"""Every cell of the refusal matrix: lossless ones by enumeration, invalid ones refused and, when forced, biased."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import pytest
import torch

import outrider
from outrider import catalog
from outrider.core.types import InputError
from outrider.drafters.model import ModelDrafter
from outrider.lengths.adaedl import AdaedlLength
from outrider.lm.tabular import TabularLM, random_rows
from outrider.proof.enumerate import law
from outrider.refusals import Cell, refusal
from outrider.trees.chain import ChainTree
from outrider.trees.fixed import FixedTree
from outrider.trees.gumbel import GumbelTree
from outrider.trees.iid import IidTree
from outrider.trees.protocol import Children, UnprunedTree
from outrider.trees.top_plus_one import TopPlusOneTree
from outrider.verifiers.match import MatchVerifier
from outrider.verifiers.recursive import RecursiveVerifier
from outrider.verifiers.traits import CHAINS, KINDS, Kind
from tests.world.copied import CopiedBeside
from tests.world.mislabelled import ChosenAsDrawn, Relabelled, Unmerged
from tests.world.tables import tables
from tests.world.verifiers import LOSSLESS, LOSSY, judges_of, verifier

BOUND = 1e-12
BIASED = 1e-3


@dataclass(frozen=True, kw_only=True)
class OneWhereTheFirstIsZero(UnprunedTree):
    """Two draws without replacement at every node, but only one where that is token 0, so that counts tell of draws."""

    structure: str = "without_replacement"

    def choose(self, level, dice):
        children = GumbelTree(branching=(2, 2)).choose(level, dice)
        second = np.arange(len(children.owners)) % 2 == 1
        kept = np.flatnonzero(~(second & (np.roll(children.tokens.numpy(), 1) == 0)))
        return Children(
            owners=children.owners[kept],
            parents=children.parents[kept],
            tokens=children.tokens[kept],
            expand=children.expand[kept],
        )


# Trees that can be enumerated, by what they are to a verifier; the stochastic beam has its own file.
TREES: dict[Kind, list[tuple[str, object, int]]] = {
    "iid paths": [("iid 2x3", IidTree(num_paths=2), 3), ("iid 3x2", IidTree(num_paths=3), 2)],
    "deduplicated iid paths": [
        ("dedup 2x3", IidTree(num_paths=2, dedup=True), 3),
        ("dedup 3x2", IidTree(num_paths=3, dedup=True), 2),
    ],
    "tree drawn without replacement": [
        ("gumbel 2x2", GumbelTree(branching=(2, 2)), 2),
        ("gumbel 3", GumbelTree(branching=(3, 1)), 2),
        ("fixed 2x1x0x1", FixedTree(children=(2, 1, 0, 1)), 3),
        ("one where the first is zero", OneWhereTheFirstIsZero(), 2),
    ],
    "top n-1 and one draw": [
        ("top_plus_one 2", TopPlusOneTree(width=2), 2),
        ("top_plus_one 3", TopPlusOneTree(width=3), 2),
    ],
    "chosen tree": [
        ("dynamic", catalog.make("tree", "dynamic:width=2,num_nodes=5"), 3),
        ("lattice", catalog.make("tree", "lattice:num_nodes=5"), 3),
        ("opt", catalog.make("tree", "opt:num_nodes=4,threshold=0.1"), 3),
        ("fixed chosen", FixedTree(children=(2, 1, 0, 1), chosen=True), 3),
    ],
    "union of chains": [("copied beside drawn", CopiedBeside(), 3)],
}


CELLS = [
    pytest.param(rule, tree, depth, id=f"{rule}-{label}")
    for kind, trees in TREES.items()
    for rule in judges_of(kind)
    for label, tree, depth in trees
]


@pytest.mark.parametrize("rule, tree, depth", CELLS)
def test_a_valid_cell_keeps_the_law_in_one_step_at_vocabulary_three(rule, tree, depth):
    found = law(tables(3, verifier(rule), depth, seed=3, tree=tree), [0, 2], 1)
    assert found.error < BOUND
    assert found.accepted > 0


@pytest.mark.parametrize("rule, tree, depth", [cell for cell in CELLS if "3x2" not in cell.id])
def test_a_valid_cell_keeps_the_law_over_three_steps_at_vocabulary_two(rule, tree, depth):
    found = law(tables(2, verifier(rule), 2, seed=4, tree=tree), [1], 3, horizon=4)
    assert found.error < BOUND


def test_every_lossless_cell_of_the_matrix_is_enumerated():
    covered = {(cell.values[0], kind) for kind, trees in TREES.items() for cell in CELLS if _is_of(cell, trees)}
    chains = {(rule, kind) for rule, make in LOSSLESS.items() for kind in make.kinds & CHAINS}
    assert covered | chains == {(rule, kind) for rule, make in LOSSLESS.items() for kind in make.kinds}


def _is_of(cell: object, trees: list) -> bool:
    return any(cell.values[1] is tree for _, tree, _ in trees)


FORCED: dict[Kind, list[object]] = {
    "iid paths": [Unmerged()],
    "deduplicated iid paths": [IidTree(num_paths=2, dedup=True)],
    # Where every node gets its full count, the last draw follows the row without the others, and top_plus_one holds.
    "tree drawn without replacement": [GumbelTree(branching=(2, 2)), OneWhereTheFirstIsZero()],
    "top n-1 and one draw": [TopPlusOneTree(width=2)],
    "chosen tree": [ChosenAsDrawn()],
    "union of chains": [CopiedBeside()],
}


STRUCTURES = {kind: structure for structure, kind in KINDS.items()}
INVALID = [(rule, kind) for rule, make in LOSSLESS.items() for kind in get_args(Kind) if kind not in make.kinds]


@pytest.mark.parametrize("rule, kind", INVALID)
def test_an_invalid_cell_is_refused_and_biased_when_forced(rule, kind):
    structure = "chain" if kind in CHAINS else STRUCTURES[kind]
    reason = refusal(
        Cell(rows="point" if kind == "chosen chain" else "sampled", structure=structure, verifier=verifier(rule))
    )
    assert reason
    assert kind in reason
    assert "use verifier" in reason
    taken = [structure for structure, kind in KINDS.items() if kind in LOSSLESS[rule].kinds]
    if not taken:
        # There is no rule to force: which path to judge is not said.
        with pytest.raises(InputError, match="branching"):
            law(tables(3, verifier(rule), 1, tree=FORCED[kind][0]), [0], 1)
    for structure in taken:
        trees = [Relabelled(tree=tree, structure=structure) for tree in FORCED[kind]]
        errors = (
            law(tables(3, verifier(rule), 2, seed, tree=tree), [0], 1).error for tree in trees for seed in range(3)
        )
        if (kind, structure) == ("iid paths", "union"):
            # A later path that does not depend on the first one may be judged as if it had been chosen.
            assert max(errors) < 1e-12
            continue
        assert any(error > BIASED for error in errors), structure


@pytest.mark.parametrize("rule", LOSSY)
def test_a_lossy_rule_is_refused_unless_allowed_and_fails_the_law_test(rule):
    for kind in LOSSY[rule].kinds:
        if kind == "chosen chain":
            continue
        structure = "chain" if kind == "sampled chain" else STRUCTURES[kind]
        cell = Cell(rows="sampled", structure=structure, verifier=verifier(rule))
        assert "lossy" in refusal(cell)
        assert refusal(cell, allow_lossy=True) is None
        tree = ChainTree() if kind == "sampled chain" else TREES[kind][0][1]
        assert law(tables(3, verifier(rule), 2, seed=6, tree=tree), [0], 1).error > BIASED, kind


def test_a_point_drafter_is_refused_with_a_branching_tree():
    assert "tree 'chain'" in refusal(Cell(rows="point", structure="deterministic", verifier=MatchVerifier()))


@pytest.mark.parametrize("tree", list(catalog.rows("tree")))
def test_drafters_that_copy_grow_trees_that_choose_and_no_drawn_ones(tree):
    structure = catalog.make("tree", tree).structure
    reason = refusal(Cell(rows="point", branches=True, structure=structure, verifier=MatchVerifier()))
    assert (reason is None) == (tree in ("chain", "dynamic", "opt", "lattice"))
    assert reason is None or "no distributions to draw from; use a tree that chooses" in reason


@pytest.mark.parametrize("drafter", ["suffix", "ngram"])
def test_load_says_which_trees_a_drafter_that_copies_grows(drafter):
    with pytest.raises(InputError, match="'dynamic' or 'opt'"):
        outrider.load(drafter=drafter, tree="gumbel")
    with pytest.raises(InputError, match="use length 'fixed'"):
        outrider.load(drafter=drafter, tree="opt", length="goodput")
    with pytest.raises(InputError, match="use verifier 'match' or 'coupled'"):
        outrider.load(drafter=drafter, tree="dynamic", verifier="traversal")


@pytest.mark.parametrize("name", [name for name in catalog.rows("length") if name != "fixed"])
def test_stopping_rules_are_refused_with_branching_trees(name):
    length = catalog.make("length", name)
    assert "for chains" in refusal(Cell(rows="sampled", structure="iid", verifier=RecursiveVerifier(), length=length))


def test_load_refuses_what_the_matrix_refuses_and_says_what_works():
    with pytest.raises(InputError, match="use verifier 'match'"):
        outrider.load(tree="dynamic", verifier="traversal")
    with pytest.raises(InputError, match="--allow-lossy"):
        outrider.load(verifier="typical")
    with pytest.raises(InputError, match="criterion=predictable"):
        outrider.load(length="tetris:criterion=original")
    outrider.load(verifier="lenient", allow_lossy=True)


def test_every_tree_gets_a_lossless_verifier_where_none_is_named():
    for name in catalog.rows("tree"):
        engine = outrider.load(tree=name, length="fixed:3")
        assert engine.generate([[5, 6, 7]], max_new_tokens=4)[0].tokens


@dataclass(frozen=True, kw_only=True)
class Forgetful(ModelDrafter):
    """A draft model whose rows change with every step, as features or new weights would make them."""

    second: Callable[[tuple[int, ...]], np.ndarray]

    @property
    def context_pure(self) -> bool:
        return False

    def begin(self, states, depths):
        guess = super().begin(states, depths)
        logits = [
            torch.from_numpy(self.second(tuple(s.tokens))).log() if s.output else own
            for s, own in zip(states, guess.logits, strict=True)
        ]
        return replace(guess, logits=torch.stack(logits))


@pytest.mark.parametrize("rule", [name for name, make in LOSSLESS.items() if make.needs_pure_rows])
def test_a_rule_that_needs_pure_rows_is_refused_and_biased_where_the_drafter_has_others(rule):
    cell = Cell(rows="sampled", structure="chain", verifier=verifier(rule))
    assert refusal(cell) is None
    assert "verifier 'block'" in refusal(replace(cell, context_pure=False))
    pure = law(tables(3, verifier(rule), 2, seed=2), [0], 3, horizon=3)
    assert pure.error < BOUND
    changing = Forgetful(lm=TabularLM(random_rows(3, seed=102), 3), second=random_rows(3, seed=77))
    parts = tables(3, verifier(rule), 2, seed=2, drafter=changing)
    assert law(parts, [0], 3, horizon=3).error > BIASED


@pytest.mark.parametrize("rule", [name for name, make in LOSSLESS.items() if make.needs_one_length])
def test_a_rule_that_needs_one_length_is_refused_and_biased_under_a_stopping_rule(rule):
    stopping = AdaedlLength(num_speculative_tokens=3, threshold=0.6)
    cell = Cell(rows="sampled", structure="chain", verifier=verifier(rule))
    assert refusal(cell) is None
    assert "one length" in refusal(replace(cell, length=stopping))
    parts = tables(3, verifier(rule), stopping, seed=0)
    assert law(parts, [0], 3, horizon=3).error > BIASED
