"""Constrained speculative decoding has the law of constrained plain decoding, for every verifier and tree."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from outrider import catalog
from outrider.core.sampling import pack
from outrider.core.types import Sampling
from outrider.drafters.ngram import NgramDrafter
from outrider.lengths.adaedl import AdaedlLength
from outrider.lengths.svip import SvipLength
from outrider.lm.tabular import random_rows
from outrider.proof.enumerate import law
from outrider.verifiers.match import MatchVerifier
from outrider.verifiers.protocol import Carrying
from tests.world.automaton import After
from tests.world.tables import tables, with_rows
from tests.world.verifiers import each, judges_of

BOUND = 1e-12
TRIGGER = After(vocab=3, followers={2: frozenset({0, 1}), 0: frozenset({1, 2})})
"""After token 2 only 0 or 1, after 0 only 1 or 2: constraints that begin and end inside a draft."""
OPENED = After(vocab=3, followers={1: frozenset({2})}, first=frozenset({0, 1}))

CHAIN_RULES = each(judges_of("sampled chain"))
TREES = [
    ("iid:num_paths=2", "recursive"),
    ("iid:num_paths=2", "kseq"),
    ("gumbel:branching=2x2", "traversal"),
    ("gumbel:branching=2x1", "recursive"),
    ("top_plus_one:width=2", "top_plus_one"),
    ("dynamic:width=3,num_nodes=5", "match"),
    ("opt:num_nodes=4", "match"),
    ("lattice:num_nodes=4", "match"),
]


def plainly(rule: After, prompt: tuple[int, ...], temperature: float = 1.0):
    """The law of constrained plain decoding, written without the package: the target's row, cut and scaled up again."""
    row = random_rows(3, 1)

    def after(output):
        kept = np.where(rule.allowed(output), row((*prompt, *output)), 0.0)
        if temperature == 0:
            return np.eye(3)[int(kept.argmax())]
        kept = kept ** (1 / temperature)
        return kept / kept.sum()

    return after


@pytest.mark.parametrize("rule", [TRIGGER, OPENED], ids=["trigger", "opened"])
@pytest.mark.parametrize("verifier", CHAIN_RULES)
def test_a_constrained_chain_has_the_law_of_constrained_plain_decoding(verifier, rule):
    steps = 4 if isinstance(verifier, Carrying) else 2
    found = law(tables(3, verifier, seed=1), [0], steps, target_law=plainly(rule, (0,)), horizon=4, constraint=rule)
    assert found.error < BOUND
    assert found.accepted > 0
    assert all(rule.fits(output) for output in found.emitted)


@pytest.mark.parametrize(("tree", "verifier"), TREES)
def test_a_constrained_tree_has_the_law_of_constrained_plain_decoding(tree, verifier):
    assembled = tables(3, catalog.make("verifier", verifier), seed=1, tree=catalog.make("tree", tree))
    found = law(assembled, [0], 2, target_law=plainly(TRIGGER, (0,)), horizon=3, constraint=TRIGGER)
    assert found.error < BOUND
    assert all(TRIGGER.fits(output) for output in found.emitted)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_temperature_comes_after_the_mask(temperature):
    found = law(
        tables(3, catalog.make("verifier", "block"), seed=1),
        [0],
        2,
        sampling=Sampling(temperature=temperature),
        target_law=plainly(TRIGGER, (0,), temperature),
        constraint=TRIGGER,
    )
    assert found.error < BOUND


@pytest.mark.parametrize(
    "length",
    [SvipLength(num_speculative_tokens=2), AdaedlLength(num_speculative_tokens=2, threshold=0.6, epsilon=0.2)],
    ids=["svip", "adaedl"],
)
def test_stopping_rules_read_masked_rows_and_keep_the_law(length):
    found = law(
        tables(3, catalog.make("verifier", "block"), length, seed=1),
        [0],
        2,
        target_law=plainly(TRIGGER, (0,)),
        horizon=4,
        constraint=TRIGGER,
    )
    assert found.error < BOUND


def test_proposals_against_the_constraint_are_rejected_and_the_law_is_kept():
    prompt = (0, 1, 2, 2, 0, 0, 1, 2)
    found = law(
        tables(3, MatchVerifier(), 3, seed=1, drafter=NgramDrafter(prompt_lookup_min=1)),
        prompt,
        2,
        target_law=plainly(TRIGGER, prompt),
        constraint=TRIGGER,
    )
    assert found.error < BOUND
    assert all(TRIGGER.fits(output) for output in found.emitted)


def test_filters_act_on_what_the_mask_leaves():
    found = law(tables(3, catalog.make("verifier", "token"), seed=1), [0], 2, Sampling(top_k=1), constraint=OPENED)
    assert found.error < BOUND
    [(output, mass)] = found.emitted.items()
    assert OPENED.fits(output)
    assert mass == pytest.approx(1, abs=1e-12)


def test_a_masked_drafter_is_accepted_more_often():
    """Rows of the drafter are masked too: where both models agree, everything stays accepted."""
    same = random_rows(3, 1)
    twins = with_rows(same, same, 3, catalog.make("verifier", "token"), 3)
    assert law(twins, [0], 1, constraint=TRIGGER).accepted == pytest.approx(3, abs=1e-12)


@dataclass(frozen=True, kw_only=True)
class Forgets(After):
    """A biased automaton: below the root of a draft it allows everything."""

    def masks(self, state, tokens, parents):
        found = super().masks(state, tokens, parents)
        found[1:] = pack(torch.ones(1, self.vocab, dtype=torch.bool))
        return found


def test_masks_of_the_root_alone_are_caught():
    forgets = Forgets(vocab=3, followers=TRIGGER.followers)
    found = law(
        tables(3, catalog.make("verifier", "token"), seed=1),
        [0],
        1,
        target_law=plainly(TRIGGER, (0,)),
        constraint=forgets,
    )
    assert found.error > 1e-3
