"""How often the tests of independence are wrong about honest dice, and what they see."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from outrider.core.dice import Purpose
from outrider.core.types import Running
from outrider.decoding.step import PhiloxDice, step_dice
from outrider.proof.draws import BOUND, NUM_SLOTS, _joint, _Tests

ROUNDS = 6


def with_other_seeds(number: int, states: list[Running]) -> PhiloxDice:
    """Production's dice of requests with other seeds."""
    seeds = [state.request.sampling.seed + (number << 32) for state in states]
    return PhiloxDice(seeds=seeds, steps=[state.num_steps for state in states])


def independence(make: Callable) -> dict[str, float]:
    tests = _Tests(make, torch.device("cpu"), shared=False)
    tests.independence()
    return tests.p_values


def test_honest_dice_of_any_seeds_are_called_independent_as_often_as_the_bound_says():
    found = [p for k in range(1, ROUNDS + 1) for p in independence(partial(with_other_seeds, k)).values()]
    # A corrected p-value is below x in at most a share x of all cases.
    for level in (0.01, 0.05, 0.2):
        most = len(found) * level
        assert sum(p < level for p in found) <= most + 4 * (most * (1 - level)) ** 0.5, (level, sorted(found)[:8])
    assert min(found) > BOUND


def test_the_p_value_of_one_pair_of_columns_is_uniform():
    rng = np.random.default_rng(3)
    throws = [torch.from_numpy(rng.integers(0, sides, (2048, 64))) for sides in (4, 2)]
    p = _joint(*throws).ravel()
    for level in (0.01, 0.05, 0.2, 0.5):
        assert np.mean(p < level) == pytest.approx(level, abs=5 * (level * (1 - level) / len(p)) ** 0.5)


DRAFT, ACCEPT, RECOVER = Purpose.DRAFT, Purpose.ACCEPT, Purpose.RECOVER


@pytest.mark.parametrize(
    ("giver", "taker", "later"),
    [
        *((giver, taker, 8) for giver in (DRAFT, ACCEPT, RECOVER) for taker in (DRAFT, RECOVER)),
        (ACCEPT, DRAFT, 1),
        (ACCEPT, DRAFT, NUM_SLOTS - 1),
    ],
)
def test_a_number_that_two_slots_share_is_seen_at_every_distance(monkeypatch, giver, taker, later):
    honest = PhiloxDice._uniform

    def uniform(self, request, slot, purpose):
        shared = purpose is taker and slot == later
        return honest(self, request, 0, giver) if shared else honest(self, request, slot, purpose)

    monkeypatch.setattr(PhiloxDice, "_uniform", uniform)
    found = independence(step_dice)
    assert min(found.values()) < 1e-100, found
    names = {purpose.name.lower() for purpose in (giver, taker)}
    worst = min(found, key=found.get)
    assert worst == (f"independence of the slots of {names.pop()}" if len(names) == 1 else _pair(names))


def _pair(names: set[str]) -> str:
    return f"independence of {' and '.join(n for n in ('draft', 'accept', 'recover') if n in names)}"
