"""Length policies follow what happened, never what was drawn."""

from itertools import product

import numpy as np
import pytest
import torch

from outrider.core.types import InputError, Step, Timing
from outrider.lengths.adaedl import AdaedlLength
from outrider.lengths.fixed import FixedLength
from outrider.lengths.heuristic import HeuristicLength
from outrider.lengths.planned import PlannedLength
from outrider.lengths.svip import SvipLength
from outrider.lengths.tetris import TetrisLength
from outrider.trees.protocol import Level


def step(drafted: int, accepted: int) -> Step:
    return Step(
        request="a",
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        tokens=(1,) * (accepted + 1),
        timing=Timing(),
        num_requests=1,
    )


def test_fixed_never_changes():
    policy = FixedLength(num_speculative_tokens=3)
    assert policy.limit(policy.update(policy.open(), step(3, 0))) == 3


def test_heuristic_grows_by_two_after_full_acceptance_and_shrinks_by_one_otherwise():
    policy = HeuristicLength(num_speculative_tokens=5, most=8)
    state = policy.open()
    lengths = []
    for drafted, accepted in ((5, 5), (7, 7), (8, 8), (8, 3), (7, 0), (0, 0)):
        state = policy.update(state, step(drafted, accepted))
        lengths.append(policy.limit(state))
    assert lengths == [7, 8, 8, 7, 6, 6]


def test_heuristic_never_falls_below_one():
    policy = HeuristicLength(num_speculative_tokens=1)
    assert policy.limit(policy.update(policy.open(), step(1, 0))) == 1


@pytest.mark.parametrize("fields", [{"num_speculative_tokens": 0}, {"num_speculative_tokens": 30}, {"grow": -1}])
def test_impossible_fields_are_refused(fields):
    with pytest.raises(InputError):
        HeuristicLength(**fields)


def test_adaedl_follows_the_worked_vector():
    policy = AdaedlLength(num_speculative_tokens=4, threshold=0.5, target_rate=0.85)
    state, seen = policy.open(), []
    for accepted, drafted in ((4, 4), (1, 4), (4, 4), (3, 3)):
        state = policy.update(state, step(drafted, accepted))
        seen.append((state.rate, state.threshold))
    expected = [(0.925, 0.5), (0.5875, 0.501), (0.79375, 0.502), (0.896875, 0.501)]
    assert np.array(seen) == pytest.approx(np.array(expected), abs=1e-12)


def level(rows: list[list[float]], depth: int) -> Level:
    logits = torch.tensor(rows).double().log()
    count = len(rows)
    return Level(
        owners=np.arange(count),
        nodes=np.full(count, depth),
        depth=depth,
        values=np.zeros((count, 0)),
        logits=logits,
        proposed=None,
        rows=None,
        so_far=lambda: None,
    )


COIN, SURE = [0.5, 0.5, 0.0], [1.0, 0.0, 0.0]


def test_adaedl_stops_over_a_uniform_pair_at_its_threshold_and_never_before_the_first_token():
    policy = AdaedlLength(threshold=0.7)
    states = [policy.open()] * 2
    assert policy.reach(states, level([COIN, SURE], 1)).tolist() == [0, 16]
    assert policy.reach(states, level([COIN, SURE], 0)) is None


def test_svip_keeps_one_token_of_an_uncertain_row_and_goes_on_after_a_certain_one():
    policy = SvipLength()
    assert policy.reach([None] * 2, level([COIN, SURE], 3)).tolist() == [1, 40]
    assert policy.reach([None], level([[0.2, 0.2, 0.6]], 0)).tolist() == [1]


def test_planned_takes_the_length_of_the_best_rate_and_follows_acceptance():
    policy = PlannedLength(draft_cost=0.1, token_cost=0.0, acceptance=0.8, most=12)
    rates = [(1 - 0.8 ** (n + 1)) / 0.2 / (1 + 0.1 * n) for n in range(1, 13)]
    state = policy.open()
    assert policy.limit(state) == 1 + int(np.argmax(rates))
    lengths = [policy.limit(state := policy.update(state, step(4, 0))) for _ in range(30)]
    assert lengths[-1] == 1
    lengths = [policy.limit(state := policy.update(state, step(4, 4))) for _ in range(60)]
    assert lengths[-1] > 8


def brute(values: np.ndarray, capacity: int) -> float:
    """The best sum of values over all beginnings within the capacity."""
    count, depth = values.shape
    sums = np.concatenate([np.zeros((count, 1)), np.exp(values).cumsum(1)], 1)
    return max(
        sum(sums[r, n] for r, n in enumerate(lengths))
        for lengths in product(range(depth + 1), repeat=count)
        if sum(lengths) <= capacity
    )


@pytest.mark.parametrize("criterion", ["predictable", "original"])
def test_tetris_takes_the_best_beginnings_within_its_budget(criterion):
    random = np.random.default_rng(0)
    for _ in range(40):
        policy = TetrisLength(num_speculative_tokens=2, extra=2, criterion=criterion)
        notes = np.log(random.uniform(0.05, 1, size=(3, 4, 2)))
        values, lengths = policy.values(notes), policy.share(notes)
        assert (np.diff(values, axis=1) <= 0).all()
        assert lengths.sum() == 6
        sums = np.concatenate([np.zeros((3, 1)), np.exp(values).cumsum(1)], 1)
        assert sums[np.arange(3), lengths].sum() == pytest.approx(brute(values, 6))


def test_tetris_is_uniform_over_equal_rows_and_never_verifies_what_was_not_drafted():
    policy = TetrisLength(num_speculative_tokens=2, extra=2)
    assert policy.share(np.full((3, 4, 2), -0.5)).tolist() == [2, 2, 2]
    short = np.full((3, 4, 2), -0.5)
    short[0, 1:] = -np.inf
    assert policy.share(short).tolist() == [1, 3, 2]
    assert TetrisLength(num_speculative_tokens=9, extra=0).share(short).tolist() == [1, 4, 4]


@pytest.mark.parametrize(
    "make, fields",
    [
        (AdaedlLength, {"gamma": 0}),
        (AdaedlLength, {"rate_decay": 2}),
        (SvipLength, {"scale": 0}),
        (PlannedLength, {"most": 0}),
        (PlannedLength, {"decay": 0}),
        (TetrisLength, {"extra": -1}),
    ],
)
def test_impossible_fields_of_stopping_rules_are_refused(make, fields):
    with pytest.raises(InputError):
        make(**fields)
