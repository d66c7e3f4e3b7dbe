"""No two purposes draw alike, and what a seed gives stays the same."""

import ast
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import outrider
from outrider.core.dice import (
    Draws,
    PhiloxDice,
    Purpose,
    _one_by_one,
    _where,
    _without_replacement,
    corpus_generator,
    numbered_seed,
    settled,
    step_generator,
)

OF_CORPUS = (Purpose.ORDER, Purpose.CROP, Purpose.HELD_OUT)
IN_DECODING = (Purpose.DRAFT, Purpose.ACCEPT, Purpose.RECOVER)
IN_A_STEP = [each for each in Purpose if each not in (*OF_CORPUS, *IN_DECODING)]


def test_no_two_purposes_share_a_number():
    assert len({each.value for each in Purpose}) == len(Purpose.__members__)


def test_no_two_purposes_of_a_row_draw_alike():
    drawn = {each: step_generator(each, seed=7, step=2, row=3).random() for each in IN_A_STEP}
    assert len(set(drawn.values())) == len(drawn)


def test_keys_of_other_parts_differ_where_zeros_or_large_numbers_stand_in_them():
    draws = [
        step_generator(Purpose.CUT, seed=7, step=0, row=3).random(),
        corpus_generator(Purpose.ORDER, seed=7, index=3).random(),
        step_generator(Purpose.CUT, seed=7, step=0).random(),
        step_generator(Purpose.CUT, seed=7, step=0, row=0).random(),
        step_generator(Purpose.CUT, seed=7 + 2**32, step=3).random(),
        step_generator(Purpose.CUT, seed=7, step=1 + 3 * 2**32).random(),
    ]
    assert len(set(draws)) == len(draws)


def test_seeds_of_outputs_and_answers_never_share_a_key():
    words = (0, 1, 2, 5, 2**32 - 1)
    seeds = {low + (high << 32) for low in words for high in words}
    numbers = {0, 1, 2, 5, 16, 2**32 - 1, 2**32, 2**32 + 1, 5 << 32}
    pairs = [(seed, number) for seed in seeds for number in numbers]
    found = {}
    for pair in pairs:
        found.setdefault(numbered_seed(*pair), []).append(pair)
    assert [same for same in found.values() if len(same) > 1] == []


@given(
    st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**20)),
    st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**20)),
)
@example((5, 3), (5 + 3 * 2**32, 0))
@example((0, 1), (2**32, 0))
@example((2, 7), (7 * 2**32, 0))
def test_two_pairs_of_seed_and_number_have_two_seeds(one: tuple[int, int], other: tuple[int, int]):
    assert (numbered_seed(*one) == numbered_seed(*other)) == (one == other)


@pytest.mark.parametrize(
    ("seed", "number", "derived"),
    [(0, 0, 15793235383387715774), (7, 1, 6635463128224577688), (2**32 - 1, 2, 831867259382209732)],
)
def test_derived_seeds_of_small_seeds_stay(seed: int, number: int, derived: int):
    assert numbered_seed(seed, number) == derived


def test_only_the_dice_make_generators_for_a_purpose():
    package = Path(outrider.__file__).parent
    found = []
    for file in package.rglob("*.py"):
        room = file.relative_to(package).parts[0]
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("default_rng"):
                continue
            keyed = any(isinstance(each, ast.List) for each in node.args)
            if (keyed and room in ("heads", "learning", "training")) or "purpose" in ast.unparse(node).lower():
                found.append(str(file.relative_to(package)))
    assert set(found) == {"core/dice.py"}


# What a seed gave before: training that goes on, and runs that are made again, draw the same.


@pytest.mark.parametrize(
    ("purpose", "number"),
    [
        (Purpose.CUT, 51588),
        (Purpose.COIN, 234409),
        (Purpose.NOISE, 22873),
        (Purpose.ANCHORS, 605230),
        (Purpose.GAPS, 749465),
        (Purpose.PADDING, 352285),
        (Purpose.GROUPS, 300525),
    ],
)
def test_the_numbers_of_a_row_stay(purpose: Purpose, number: int):
    assert step_generator(purpose, seed=7, step=2, row=3).integers(10**6) == number


@pytest.mark.parametrize(("purpose", "number"), [(Purpose.AGE, 322165), (Purpose.HEAD, 978774)])
def test_the_numbers_of_a_step_stay(purpose: Purpose, number: int):
    assert step_generator(purpose, seed=7, step=2).integers(10**6) == number


@pytest.mark.parametrize(
    ("purpose", "index", "number"),
    [(Purpose.ORDER, 3, 101892), (Purpose.CROP, 3, 34625), (Purpose.HELD_OUT, 0, 591594)],
)
def test_the_numbers_of_a_corpus_stay(purpose: Purpose, index: int, number: int):
    assert corpus_generator(purpose, seed=7, index=index).integers(10**6) == number


@pytest.mark.parametrize(
    ("purpose", "uniforms", "noise"),
    [
        (Purpose.DRAFT, [0.899264904, 0.306546793], -0.269192667),
        (Purpose.ACCEPT, [0.422768587, 0.672560748], -0.644865790),
        (Purpose.RECOVER, [0.241668506, 0.664325762], -0.993890053),
    ],
)
def test_the_numbers_of_decoding_stay(purpose: Purpose, uniforms: list[float], noise: float):
    dice = PhiloxDice(seeds=[5], steps=[3])
    assert [dice._uniform(0, slot, purpose) for slot in (0, 7)] == pytest.approx(uniforms, abs=1e-9)
    draws = Draws(requests=np.array([0]), slots=np.array([2]), purpose=purpose)
    assert dice.gumbel(1, draws).item() == pytest.approx(noise, abs=1e-9)


def test_a_running_sum_that_rises_and_falls_at_zeros_never_leads_to_one(monkeypatch):
    """Parallel sums need not be monotone: here they are off by up to a tenth of their size."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(2000, 12, generator=generator) * (torch.rand(2000, 12, generator=generator) < 0.3)
    weights[weights.sum(-1) == 0, 4] = 1.0
    honest = torch.Tensor.cumsum

    def parallel(self, dim, dtype=None):
        running = honest(self, dim, dtype=dtype)
        return running * (0.9 + 0.2 * torch.rand(running.shape, generator=torch.Generator().manual_seed(1)))

    monkeypatch.setattr(torch.Tensor, "cumsum", parallel)
    uniforms = torch.rand(2000, dtype=torch.float64, generator=generator)
    rough = weights.cumsum(-1, dtype=torch.float64)
    unguarded = torch.searchsorted(rough, uniforms[:, None] * rough[:, -1:], right=True).clamp_max(11)
    assert (weights.gather(1, unguarded) == 0).any(), "a plant that leads to no zero tests nothing"
    found = drawn_from(settled(rough.clone(), weights), uniforms)
    assert (weights.gather(1, found[:, None]) > 0).all()


def test_draws_one_by_one_are_those_from_one_running_sum():
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(300, 7, dtype=torch.float64, generator=generator)
    weights[::3, :5] = 0
    uniforms = torch.rand(4, 300, dtype=torch.float64, generator=generator)
    assert torch.equal(_one_by_one(weights, uniforms), _without_replacement(weights, uniforms))


def drawn_from(running: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    return _where(running, running[:, -1:], uniforms[:, None])[:, 0]
