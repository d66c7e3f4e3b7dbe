"""The law of the production code, enumerated; toys, and negative vectors that a right checker must catch."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from jaxtyping import Float
from torch import Tensor

from outrider import catalog
from outrider.core.dice import Dice, Purpose
from outrider.core.types import Draft, Sampling, Verdict
from outrider.drafters.memory import TextMemory
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.none import NoDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.lengths.adaedl import AdaedlLength
from outrider.lengths.fixed import FixedLength
from outrider.lengths.heuristic import HeuristicLength
from outrider.lengths.planned import PlannedLength
from outrider.lengths.svip import SvipLength
from outrider.lm.tabular import TabularLM, random_rows
from outrider.proof.enumerate import law
from outrider.refusals import Cell, refusal
from outrider.trees.chain import ChainTree
from outrider.trees.protocol import Children, UnprunedTree
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.match import MatchVerifier
from outrider.verifiers.protocol import Carrying, everyone
from outrider.verifiers.token import TokenVerifier
from tests.world.biased import ProductOfUniforms, RecoversFromTheTarget
from tests.world.tables import tables, toy, with_rows
from tests.world.verifiers import CARRYING, FOR_ANY_LENGTH, LOSSLESS, each, judges_of

VERIFIERS = each(judges_of("sampled chain"))
FOR_CHOSEN = each(judges_of("chosen chain"))
STOPPED = each(name for name in judges_of("sampled chain") if name in FOR_ANY_LENGTH)
REMEMBERING = replace(SuffixDrafter(min_match=1), _memory=TextMemory(99))
REMEMBERING._memory.add(None, [0, 1, 0, 2, 2, 1, 1, 0, 2])
REMEMBERING._memory.read(99)
BOUND = 1e-12


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("seed", range(3))
def test_one_step_of_a_chain_of_four_at_vocabulary_three_keeps_the_law(verifier, seed):
    found = law(tables(3, verifier, 4, seed), [0], 1)
    assert found.error < BOUND


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_steps_that_prefill_what_came_before_keep_the_law(verifier):
    found = law(tables(2, verifier, 2, seed=5), [0, 1, 0], 2, prefilled=False)
    assert found.error < BOUND


@pytest.mark.parametrize("verifier", each(CARRYING))
@pytest.mark.parametrize("gamma", [2, 3])
def test_a_verifier_that_carries_something_keeps_the_law_over_the_steps_that_it_reaches(verifier, gamma):
    found = law(tables(3, verifier, gamma, seed=8), [0], 4, horizon=4)
    assert found.error < BOUND
    assert max(map(len, found.emitted)) > 4


LENGTHS = [
    pytest.param(HeuristicLength(num_speculative_tokens=2, most=3), id="heuristic"),
    pytest.param(AdaedlLength(num_speculative_tokens=2, threshold=0.66, epsilon=0.2), id="adaedl"),
    pytest.param(SvipLength(num_speculative_tokens=2), id="svip"),
    pytest.param(PlannedLength(most=3, prior=1, draft_cost=0.3), id="planned"),
]


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_three_steps_at_vocabulary_two_keep_the_law(verifier):
    horizon = 3 if isinstance(verifier, Carrying) else None
    found = law(tables(2, verifier, 2, seed=5), [1], 3, horizon=horizon)
    assert found.error < BOUND


@pytest.mark.parametrize("verifier", STOPPED)
@pytest.mark.parametrize("length", LENGTHS)
def test_three_steps_at_vocabulary_two_keep_the_law_under_every_stopping_rule(verifier, length):
    found = law(tables(2, verifier, length, seed=5), [1], 3, horizon=5)
    assert found.error < BOUND


@pytest.mark.parametrize("verifier", STOPPED)
@pytest.mark.parametrize(
    "length",
    [
        HeuristicLength(num_speculative_tokens=1, grow=1, most=2),
        AdaedlLength(num_speculative_tokens=2, threshold=0.6, epsilon=0.2),
    ],
    ids=["heuristic", "adaedl"],
)
def test_three_steps_at_vocabulary_three_keep_the_law_where_a_length_is_carried_over(verifier, length):
    found = law(tables(3, verifier, length, seed=7), [0], 3, horizon=4)
    assert found.error < BOUND


@pytest.mark.parametrize("verifier", FOR_CHOSEN)
@pytest.mark.parametrize(
    "drafter",
    [NoDrafter(), NgramDrafter(prompt_lookup_min=1), SuffixDrafter(min_match=1), REMEMBERING],
    ids=["none", "ngram", "suffix", "suffix with a remembered text"],
)
def test_chosen_drafts_keep_the_law_over_three_steps(verifier, drafter):
    parts = tables(3, verifier, 3, seed=9, drafter=drafter)
    found = law(parts, [0, 1, 2, 0, 1, 2, 0, 1], 2)
    assert found.error < BOUND
    if not isinstance(drafter, NoDrafter):
        assert found.accepted > 0


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize(
    "drafter",
    [NgramDrafter(prompt_lookup_min=1), SuffixDrafter(min_match=1), REMEMBERING],
    ids=["ngram", "suffix", "suffix with a remembered text"],
)
def test_trees_of_copies_keep_the_law_with_every_verifier_that_is_not_refused(rule, drafter):
    reason = refusal(Cell(rows="point", branches=True, structure="deterministic", verifier=LOSSLESS[rule]()))
    if rule not in judges_of("chosen tree"):
        assert "use verifier 'match' or 'coupled'" in reason
        return
    assert reason is None
    tree = catalog.make("tree", "dynamic:width=3,num_nodes=6")
    parts = tables(3, LOSSLESS[rule](), 2, seed=9, drafter=drafter, tree=tree)
    found = law(parts, [0, 1, 2, 0, 1, 1, 0, 1, 2, 0, 1], 2, horizon=4)
    chain = law(replace(parts, tree=ChainTree()), [0, 1, 2, 0, 1, 1, 0, 1, 2, 0, 1], 2, horizon=4)
    assert found.error < BOUND
    assert found.accepted > 1.1 * chain.accepted, "several children are more than one"


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.5),
        Sampling(top_k=2),
        Sampling(top_p=0.7),
        Sampling(min_p=0.4),
        Sampling(repetition_penalty=1.7, frequency_penalty=0.3, presence_penalty=0.2, logit_bias={1: 0.5}),
        Sampling(temperature=0.0),
    ],
    ids=["temperature", "top-k", "top-p", "min-p", "penalties", "greedy"],
)
def test_sampling_settings_keep_their_own_law_at_every_node(verifier, sampling):
    parts = tables(3, verifier, 3, seed=11)
    assert law(parts, [0, 2], 1, sampling=sampling).error < BOUND


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_zeros_in_either_row_keep_the_law(verifier):
    p = TabularLM(lambda prefix: np.roll([0.0, 0.25, 0.75], len(prefix)), 3)
    q = ModelDrafter(lm=TabularLM(lambda prefix: np.roll([0.5, 0.0, 0.5], sum(prefix)), 3))
    parts = tables(3, verifier, 3, target=p, drafter=q)
    assert law(parts, [0], 2).error < BOUND


def test_equal_rows_accept_everything():
    same = random_rows(3, seed=2)
    for verifier in (TokenVerifier(), BlockVerifier()):
        parts = with_rows(same, same, 3, verifier, 3)
        assert law(parts, [0], 1).accepted == pytest.approx(3, abs=1e-12)


def test_the_toy_gives_ten_ninths_to_token_and_eleven_ninths_to_block():
    assert law(toy(TokenVerifier()), [0], 1).accepted == pytest.approx(10 / 9, abs=1e-12)
    assert law(toy(BlockVerifier()), [0], 1).accepted == pytest.approx(11 / 9, abs=1e-12)


def test_block_is_never_below_token_on_two_hundred_random_instances():
    for seed in range(200):
        gamma = 1 + seed % 3
        length = FixedLength(num_speculative_tokens=gamma)
        by_token, by_block = (
            law(tables(2 + seed % 2, v, length, seed), [0], 1).accepted for v in (TokenVerifier(), BlockVerifier())
        )
        assert by_block >= by_token - 1e-12, (seed, by_token, by_block)
        if gamma == 1:
            assert by_block == pytest.approx(by_token, abs=1e-12)


def test_block_gains_nothing_at_temperature_zero_or_on_chosen_drafts():
    for sampling, drafter in ((Sampling(temperature=0), None), (Sampling(), NgramDrafter(prompt_lookup_min=1))):
        both = [
            law(tables(3, v, 3, 3, drafter=drafter), [0, 1, 0, 1], 2, sampling).accepted
            for v in (TokenVerifier(), BlockVerifier())
        ]
        assert both[0] == pytest.approx(both[1], abs=1e-12)


# Rules that are biased. A checker that passes one is broken.


@dataclass(frozen=True, kw_only=True)
class ArgmaxScoredWithItsSoftmax(UnprunedTree):
    """Drafts the argmax but hands over the softmax row, as if the token had been drawn from it."""

    @property
    def structure(self):
        return "chain"

    def choose(self, level, dice):
        return replace(ChainTree().choose(level, dice), tokens=level.rows.argmax(-1))


def test_an_argmax_scored_with_its_softmax_is_caught():
    biased = tables(3, TokenVerifier(), 2, tree=ArgmaxScoredWithItsSoftmax())
    assert law(biased, [0], 1).error > 1e-3


def test_a_wrong_block_rule_is_caught():
    assert law(tables(3, ProductOfUniforms(), 3), [0], 1).error > 1e-3


def test_recovering_from_the_target_instead_of_the_residual_is_caught():
    assert law(tables(3, RecoversFromTheTarget(), 2), [0], 1).error > 1e-3


@dataclass(frozen=True, kw_only=True)
class DropsUnlikelyDraws(UnprunedTree):
    """Draws a token and then drops it because its own probability is low."""

    @property
    def structure(self):
        return "chain"

    def choose(self, level, dice):
        children = ChainTree().choose(level, dice)
        likely = level.rows.gather(1, children.tokens[:, None]).squeeze(1) >= 0.5
        kept = np.flatnonzero(likely.numpy())
        return Children(
            owners=children.owners[kept],
            parents=children.parents[kept],
            tokens=children.tokens[likely],
            expand=children.expand[kept],
        )


@pytest.mark.parametrize("verifier", [TokenVerifier(), BlockVerifier()], ids=["token", "block"])
def test_dropping_a_draw_because_of_its_own_probability_is_caught(verifier):
    p, q = np.array([0.5, 0.5]), np.array([0.9, 0.1])
    found = law(with_rows(lambda _: p, lambda _: q, 2, verifier, 1, tree=DropsUnlikelyDraws()), [0], 1)
    first = sum(mass for output, mass in found.emitted.items() if output[0] == 0)
    assert first == pytest.approx(0.55, abs=1e-12)
    assert found.error > 1e-3


@dataclass(frozen=True, kw_only=True)
class ReusesOneDraw:
    """Token verification that recovers with the slot it accepted with."""

    def verify(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Verdict:
        everything = everyone(draft, 0, Purpose.ACCEPT)
        dice.accept(np.full(draft.num_requests, 0.5), everything)
        dice.accept(np.full(draft.num_requests, 0.5), everything)
        return TokenVerifier().verify(draft, target_rows, dice)


def test_using_one_random_number_twice_is_caught():
    with pytest.raises(RuntimeError, match="used twice"):
        law(tables(2, ReusesOneDraw(), 1), [0], 1)


def test_match_accepts_the_sum_of_target_path_probabilities_of_a_chosen_chain():
    prompt = [0, 1, 2, 0, 1, 2, 0]
    target = TabularLM(random_rows(3, seed=21), 3)
    parts = tables(3, MatchVerifier(), 2, target=target, drafter=NgramDrafter(prompt_lookup_min=1))
    first = random_rows(3, seed=21)(tuple(prompt))[1]
    second = random_rows(3, seed=21)((*prompt, 1))[2]
    assert law(parts, prompt, 1).accepted == pytest.approx(first + first * second, abs=1e-12)
