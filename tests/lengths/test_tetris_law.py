"""The law of a batch that shares its budget of verified tokens (TETRIS)."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from outrider.drafters.model import ModelDrafter
from outrider.lengths.tetris import TetrisLength
from outrider.lm.tabular import TabularLM
from outrider.proof.enumerate import joint_law
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.token import TokenVerifier
from tests.world.tables import tables
from tests.world.verifiers import FOR_ANY_LENGTH, judges_of, verifier

BOUND = 1e-12
BIASED = 1e-3


def pair(criterion: str, rule: object, length: type = TetrisLength) -> list:
    """Two requests, two tokens drafted for each and two to be verified in all."""
    policy = length(num_speculative_tokens=1, extra=1, criterion=criterion)
    return joint_law(tables(2, rule, policy, seed=12), [[0], [1, 1]])


@pytest.mark.parametrize("rule", [name for name in judges_of("sampled chain") if name in FOR_ANY_LENGTH])
def test_predictable_tetris_keeps_the_law_of_every_request(rule):
    laws = pair("predictable", verifier(rule))
    assert max(found.error for found in laws) < BOUND


@dataclass(frozen=True, kw_only=True)
class BySquares(TetrisLength):
    """Predictable TETRIS with the row's sum of squares for the chance of acceptance, which a token may exceed."""

    def note(self, level, tokens):
        own = level.scores.gather(1, tokens[:, None])
        return torch.cat([own, level.scores.exp().square().sum(-1, keepdim=True).log()], 1)


@dataclass(frozen=True, kw_only=True)
class WithoutMinimum(BySquares):
    """The same with values that may rise along a draft, so that a deeper one tells something of the token before."""

    def share(self, notes):
        own, row = notes[..., 0], notes[..., 1]
        values = row + np.concatenate([np.zeros((len(own), 1)), own.cumsum(1)[:, :-1]], 1)
        best = np.argsort(-values.ravel(), kind="stable")[: self.num_speculative_tokens * len(values)]
        lengths = np.zeros(len(values), dtype=np.int64)
        np.maximum.at(lengths, best // values.shape[1], best % values.shape[1] + 1)
        return lengths


@pytest.mark.parametrize("rule", [TokenVerifier(), BlockVerifier()], ids=["token", "block"])
def test_the_published_tetris_and_one_without_the_running_minimum_are_biased(rule):
    chances = {0: (0.9, 0.99), 1: (0.93, 0.95)}

    def rows(prefix: tuple[int, ...]) -> np.ndarray:
        high = chances[prefix[0]][min(len(prefix), 2) - 1]
        return np.array([high, 1 - high])

    def worst(policy: TetrisLength) -> float:
        target, drafter = TabularLM(lambda _: np.array([0.5, 0.5]), 2), ModelDrafter(lm=TabularLM(rows, 2))
        parts = tables(2, rule, policy, target=target, drafter=drafter)
        return max(found.error for found in joint_law(parts, [[0], [1]]))

    assert worst(TetrisLength(num_speculative_tokens=1, extra=1, criterion="original")) > BIASED
    assert worst(WithoutMinimum(num_speculative_tokens=1, extra=1)) > BIASED
    assert worst(BySquares(num_speculative_tokens=1, extra=1)) < BOUND
    assert worst(TetrisLength(num_speculative_tokens=1, extra=1)) < BOUND
