"""Steps of trees counted on a text: their expectations are those of enumerated runs."""

from itertools import product

import numpy as np
import pytest
import torch

from outrider import InputError
from outrider.drafters.model import ModelDrafter
from outrider.lm.tabular import Row, TabularLM, random_rows
from outrider.plan.tree_coverage import Branches, DraftedTree, SharedPaths, accepted_of_distinct
from outrider.proof.enumerate import law
from outrider.theory.acceptance import recursive_without_replacement
from outrider.trees.gumbel import GumbelTree
from outrider.trees.iid import IidTree
from outrider.verifiers.kseq import KseqVerifier
from outrider.verifiers.recursive import RecursiveVerifier
from recipes.inquiry.texts import RecordedText
from tests.world.parts import parts_of

BEFORE = 2


def on_texts(target: Row, draft: Row, tree: DraftedTree, vocab: int) -> tuple[float, float]:
    """Means of steps and tokens over all texts that the target says after the prompt [0]."""
    steps = tokens = 0.0
    for text in product(range(vocab), repeat=BEFORE + tree.depth):
        p, q = (np.array([row((0, *text[:i])) for i in range(len(text))]) for row in (target, draft))
        if (mass := p[np.arange(len(text)), text].prod()) > 0:
            said = RecordedText(tokens=text, p=p, q=q, starts=np.zeros(len(text)))
            found = said.covered(tree, BEFORE)
            steps, tokens = steps + mass * found.steps, tokens + mass * found.tokens
    return steps, tokens


def enumerated(target: Row, draft: Row, tree: DraftedTree, vocab: int) -> tuple[float, float]:
    """The same of runs of the production loop: outputs that have reached the bound make no further step."""
    paths = isinstance(tree, SharedPaths)
    parts = parts_of(
        TabularLM(target, vocab),
        ModelDrafter(lm=TabularLM(draft, vocab)),
        tree=IidTree(num_paths=tree.count) if isinstance(tree, SharedPaths) else GumbelTree(branching=tree.counts),
        verifier=KseqVerifier() if paths and tree.rule == "kseq" else RecursiveVerifier(),
        length=tree.depth,
    )
    after = [law(parts, [0], count, horizon=BEFORE).emitted for count in range(BEFORE + 1)]
    steps = sum(mass for emitted in after for output, mass in emitted.items() if len(output) < BEFORE)
    return steps, sum(mass * len(output) for output, mass in after[-1].items())


TREES = [
    Branches(counts=(2,)),
    Branches(counts=(2, 1)),
    Branches(counts=(2, 2)),
    Branches(counts=(3, 1)),
    SharedPaths(count=2, depth=2, rule="recursive"),
    SharedPaths(count=3, depth=1, rule="recursive"),
    SharedPaths(count=3, depth=2, rule="recursive"),
    SharedPaths(count=2, depth=2, rule="kseq"),
    SharedPaths(count=3, depth=2, rule="kseq"),
]


WIDE = Branches(counts=(3, 1))
"""Three distinct tokens are a choice where there are four."""


@pytest.mark.parametrize(
    ("tree", "seed"), [(tree, seed) for tree in TREES for seed in range(1 if tree == WIDE else 2)], ids=str
)
def test_means_over_texts_are_those_of_enumerated_runs(tree, seed):
    # Where nodes are many, two tokens show the same.
    vocab = 4 if tree == WIDE else 2 if tree.num_nodes == 6 and isinstance(tree, SharedPaths) else 3
    rows = random_rows(vocab, seed), random_rows(vocab, seed + 50)
    assert on_texts(*rows, tree, vocab) == pytest.approx(enumerated(*rows, tree, vocab), abs=1e-11)


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_tokens_that_a_side_rules_out_keep_the_means(tree):
    target, draft = (lambda s: np.roll([0.0, 0.25, 0.75], len(s))), (lambda s: np.roll([0.5, 0.0, 0.5], sum(s)))
    assert on_texts(target, draft, tree, 3) == pytest.approx(enumerated(target, draft, tree, 3), abs=1e-11)


def test_three_distinct_draws_are_near_the_exact_figure_where_first_draws_are_sampled():
    dice = np.random.default_rng(0)
    p, q = (np.exp(dice.normal(0, 1.5, 40)) for _ in range(2))
    p, q = p / p.sum(), q / q.sum()
    means = [np.mean([accepted_of_distinct(p, q, x, 3, s) for s in np.arange(0.05, 1, 0.1)]) for x in range(40)]
    exact = float(recursive_without_replacement(torch.from_numpy(p), torch.from_numpy(q), 3))
    assert sum(means) == pytest.approx(exact, abs=2e-3)


def test_a_text_that_does_not_show_what_a_step_emits_is_refused():
    rows = np.full((4, 3), 1 / 3)
    said = RecordedText(tokens=(0, 1, 2, 0), p=rows, q=rows, starts=np.zeros(4))
    with pytest.raises(InputError, match="does not show steps of 2 that begin before 3"):
        said.covered(Branches(counts=(2, 1)), 3)
