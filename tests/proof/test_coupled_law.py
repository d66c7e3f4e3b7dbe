"""The law of coupled draws beyond the cells of the matrix: how much is accepted, batches, whole runs, and mutants."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from outrider.core.coupled_dice import CoupledDice
from outrider.core.dice import Dice, Draws, PhiloxDice, Purpose
from outrider.core.types import Draft, ShortList, Verdict
from outrider.drafters.model import ModelDrafter
from outrider.lm.tabular import TabularLM, random_rows
from outrider.proof.enumerate import joint_law, law
from outrider.theory.acceptance import coupled_acceptance
from outrider.trees.gumbel import GumbelTree
from outrider.verifiers.coupled import CoupledVerifier
from outrider.verifiers.match import MatchVerifier
from outrider.verifiers.protocol import chains, child_rows, everyone, residual, upload
from tests.proof.tiny_runs import assert_lossless, drafter, engine, tiny, walk
from tests.world.tables import tables, with_rows

BOUND = 1e-12
BIASED = 1e-3


def agreement(p: np.ndarray, q: np.ndarray) -> float:
    """Daliri et al. 2024, theorem 3."""
    return sum(1 / sum(max(p[y] / p[x], q[y] / q[x]) for y in range(len(p))) for x in range(len(p)))


def test_the_closed_form_is_that_of_every_pair_of_tokens():
    p, q = np.random.default_rng(0).dirichlet(np.ones(9), size=(2, 20))
    found = coupled_acceptance(torch.from_numpy(p), torch.from_numpy(q))
    np.testing.assert_allclose(found, [agreement(*rows) for rows in zip(p, q, strict=True)], atol=BOUND)
    gap = torch.tensor([[0.5, 0.0, 0.5], [1.0, 0.0, 0.0]]), torch.tensor([[0.25, 0.75, 0.0], [0.0, 0.0, 1.0]])
    # Tokens that one of the rows lacks never agree: 1 / (max(1, 1) + 3 + 1) for the first.
    np.testing.assert_allclose(coupled_acceptance(*gap), [1 / 5, 0], atol=1e-7)


@pytest.mark.parametrize("vocab", [2, 3, 4])
def test_a_draft_token_is_accepted_as_often_as_the_coupling_says(vocab):
    p, q = np.random.default_rng(vocab).dirichlet(np.ones(vocab), size=2)
    rows = (lambda _: p), (lambda _: q)
    accepted = [law(with_rows(*rows, vocab, CoupledVerifier(), depth), [0], 1).accepted for depth in (1, 2)]
    once = agreement(p, q)
    assert accepted == pytest.approx([once, once + once**2], abs=BOUND)
    apart = law(with_rows(*rows, vocab, MatchVerifier(), 1), [0], 1).accepted
    assert apart + 0.01 < once < 1 - np.abs(p - q).sum() / 2 + BOUND


def test_production_accepts_as_often_as_the_enumeration():
    p, q = np.random.default_rng(1).dirichlet(np.ones(3), size=2)
    count = 4000
    dice = CoupledDice(seeds=list(range(count)), positions=[5] * count, others=PhiloxDice([0] * count, [0] * count))
    both = [
        dice.pick(torch.from_numpy(row).expand(count, 3), _at(np.arange(count), np.zeros(count, dtype=int), purpose))
        for row, purpose in ((q, Purpose.DRAFT), (p, Purpose.RECOVER))
    ]
    expected = agreement(p, q)
    assert abs(float((both[0] == both[1]).double().mean()) - expected) < 4 * (expected * (1 - expected) / count) ** 0.5


def test_the_tree_of_the_largest_accepts_more_than_the_chain():
    accepted = [
        law(tables(3, CoupledVerifier(), 1, seed=3, tree=tree), [0], 1).accepted
        for tree in (None, GumbelTree(branching=(2,)), GumbelTree(branching=(3,)))
    ]
    assert accepted[0] + 0.05 < accepted[1] < accepted[2] - 0.01
    assert accepted[2] == pytest.approx(1, abs=BOUND)


def test_a_drafter_with_a_short_list_keeps_the_law_and_races_with_the_noise_of_its_tokens():
    few = ShortList.of(torch.tensor([0, 2]), 3)
    guesser = ModelDrafter(lm=TabularLM(random_rows(2, seed=4), 2), short_list=few)
    found = law(tables(3, CoupledVerifier(), 2, seed=3, drafter=guesser), [0, 2], 2)
    apart = law(tables(3, MatchVerifier(), 2, seed=3, drafter=guesser), [0, 2], 2)
    assert found.error < BOUND
    assert found.accepted > apart.accepted + 0.1


def test_requests_of_a_batch_keep_their_laws():
    parts = tables(2, CoupledVerifier(), 2, seed=2)
    for found in joint_law(parts, [[0, 1], [1]]):
        assert found.error < BOUND


@pytest.mark.usefixtures("float64_stays_float64")
@pytest.mark.parametrize(("tree", "vocab"), [("chain", 3), ("gumbel:branching=2x1", 2)])
def test_whole_runs_of_a_llama_keep_their_law(tree, vocab):
    assert_lossless(walk(engine(tiny("llama", vocab), drafter("llama", vocab), "coupled", tree), most=3))


def _at(requests: np.ndarray, depths: np.ndarray, purpose: Purpose) -> Draws:
    return Draws(requests=requests, slots=depths, purpose=purpose, depths=depths)


@dataclass(frozen=True, kw_only=True)
class TokenOnPositionKeys(CoupledVerifier):
    """Token verification that draws the recovered token with the noise that drew the rejected one (as a public engine
    once did)."""

    def verify(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Verdict:
        side = chains(draft, target_rows)
        accepted = np.zeros_like(side.lengths)
        for i in range(side.depth):
            alive = accepted == i
            accepted += alive & dice.accept(side.ratios[:, i].clip(max=1) * alive, everyone(draft, i, Purpose.ACCEPT))
        last = side.roots + accepted
        p = target_rows[upload(last, target_rows.device)]
        left = residual(p, child_rows(draft, last, p))
        weights = torch.where(torch.from_numpy(accepted < side.lengths)[:, None], left, p)
        return side.verdict(accepted, dice.pick(weights, _at(np.arange(len(last)), accepted, Purpose.RECOVER)))


@dataclass(frozen=True, kw_only=True)
class BlamesTheDraft(CoupledVerifier):
    """Where the draft's token is rejected, the target does not draw it either."""

    def verify(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Verdict:
        found = super().verify(draft, target_rows, dice)
        side = chains(draft, target_rows)
        last = side.roots + found.num_accepted
        p = target_rows[upload(last, target_rows.device)]
        rejected = torch.from_numpy(found.num_accepted < side.lengths)
        second = residual(p, child_rows(draft, last, p)).argmax(-1)
        return side.verdict(found.num_accepted, torch.where(rejected, second, found.next_tokens))


@pytest.mark.parametrize("mutant", [TokenOnPositionKeys(), BlamesTheDraft()], ids=repr)
def test_a_rule_that_uses_the_noise_of_a_position_otherwise_is_caught(mutant):
    assert law(tables(3, mutant, 2, seed=1), [0], 1).error > BIASED


def test_one_noise_for_all_positions_of_a_draft_is_caught(monkeypatch):
    monkeypatch.setattr(
        "outrider.verifiers.match.everyone",
        lambda draft, slot, purpose, active, depth: everyone(draft, slot, purpose, active, depth=0),
    )
    assert law(tables(3, CoupledVerifier(), 2, seed=1), [0], 1).error > BIASED
