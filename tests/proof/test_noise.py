"""The exact law of several races with one noise, against closed forms."""

import math
from itertools import permutations

import numpy as np
import pytest

from outrider.proof.noise import RaceNoise

BOUND = 1e-14


def random_rows(vocab: int, count: int, seed: int) -> list[list[float]]:
    return np.random.default_rng(seed).dirichlet(np.ones(vocab), size=count).tolist()


@pytest.mark.parametrize("vocab", [2, 3, 4, 5])
@pytest.mark.parametrize("seed", range(3))
def test_two_races_agree_as_often_as_the_law_of_their_coupling_says(vocab, seed):
    p, q = random_rows(vocab, 2, seed)
    for x, (chance, known) in RaceNoise.unknown(vocab).race(q).items():
        assert chance == pytest.approx(q[x], abs=BOUND)
        both = chance * known.race(p)[x][0]
        assert both == pytest.approx(1 / sum(max(p[y] / p[x], q[y] / q[x]) for y in range(vocab)), abs=BOUND)


@pytest.mark.parametrize("vocab", [2, 3, 4])
def test_the_second_of_two_races_keeps_its_own_law(vocab):
    p, q = random_rows(vocab, 2, seed=5)
    total = np.zeros(vocab)
    for chance, known in RaceNoise.unknown(vocab).race(q).values():
        for x, (then, _) in known.race(p).items():
            total[x] += chance * then
    np.testing.assert_allclose(total, p, atol=BOUND)


def test_the_order_of_a_race_is_drawn_without_replacement():
    [weights] = random_rows(4, 1, seed=2)
    for order in permutations(range(4)):
        known, left, chance, expected = RaceNoise.unknown(4), list(weights), 1.0, 1.0
        for token in order:
            then, known = known.race(left)[token]
            expected *= left[token] / sum(left)
            chance, left[token] = chance * then, 0.0
        assert chance == pytest.approx(expected, abs=BOUND)


def test_any_number_of_races_has_a_law_and_the_last_one_keeps_its_own():
    *earlier, last = random_rows(3, 5, seed=7)
    worlds = [(1.0, RaceNoise.unknown(3))]
    for row in earlier:
        worlds = [(mass * chance, then) for mass, known in worlds for chance, then in known.race(row).values()]
    total = np.zeros(3)
    for mass, known in worlds:
        assert known.probability == pytest.approx(mass, abs=BOUND)
        for x, (chance, _) in known.race(last).items():
            total[x] += mass * chance
    np.testing.assert_allclose(total, last, atol=1e-13)


def test_a_race_that_is_run_again_is_decided():
    [row] = random_rows(3, 1, seed=1)
    for x, (_, known) in RaceNoise.unknown(3).race(row).items():
        [(again, (chance, _))] = known.race([4 * weight for weight in row]).items()
        assert (again, chance) == (x, pytest.approx(1, abs=BOUND))


def test_the_volume_is_that_of_sampled_noise():
    p, q = [0.5, 0.3, 0.2], [0.1, 0.3, 0.6]
    times = np.random.default_rng(0).exponential(size=(200_000, 3))
    sampled = np.zeros((3, 3))
    np.add.at(sampled, ((times / q).argmin(1), (times / p).argmin(1)), 1 / len(times))
    for y, (chance, known) in RaceNoise.unknown(3).race(q).items():
        for x, (then, _) in known.race(p).items():
            both = chance * then
            assert abs(sampled[y, x] - both) < 5 * math.sqrt(both / len(times))
