"""Dice whose noise belongs to a position: what it depends on, and how often two rows pick the same token."""

import numpy as np
import pytest
import torch

from outrider.core.coupled_dice import CoupledDice, noise_at
from outrider.core.dice import Draws, PhiloxDice, Purpose
from outrider.core.types import ShortList
from outrider.decoding.step import coupled_dice, step_dice
from outrider.proof.draws import BOUND, dice_law

VOCAB = 9


def dice(seeds: list[int], positions: list[int], step: int = 0) -> CoupledDice:
    others = PhiloxDice(seeds=seeds, steps=[step] * len(seeds))
    return CoupledDice(seeds=seeds, positions=positions, others=others)


def draws(requests: list[int], depths: list[int], purpose: Purpose = Purpose.DRAFT, active: list[bool] | None = None):
    slots = np.arange(len(requests)) * 10
    matters = None if active is None else np.array(active)
    return Draws(requests=np.array(requests), slots=slots, purpose=purpose, depths=np.array(depths), active=matters)


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).dirichlet(np.full(VOCAB, 0.5), size=count)).float()


def test_the_noise_of_a_seed_and_a_position_stays():
    assert noise_at(7, 12, 4).tolist() == pytest.approx([1.2834, 1.378286, 0.758018, 16.234484], rel=1e-6)


def test_noise_is_that_of_the_seed_the_position_and_the_token_alone():
    known = noise_at(5, 3, VOCAB)
    assert torch.equal(noise_at(5, 3, 2 * VOCAB)[:VOCAB], known)
    for seed, position in ((6, 3), (5, 4), (5 + 2**32, 3), (5, 2**40)):
        assert not torch.equal(noise_at(seed, position, VOCAB), known)


def test_noise_is_exponential_and_never_zero_or_infinite():
    times = 1 / torch.cat([noise_at(0, position, 4096) for position in range(64)]).double()
    count = len(times)
    assert bool(times.isfinite().all())
    assert bool((times > 0).all())
    for power, moment, variance in ((1, 1, 1), (2, 2, 20)):
        assert abs(float((times**power).mean()) - moment) < 5 * (variance / count) ** 0.5


def test_a_pick_depends_on_the_position_and_not_on_step_slot_purpose_or_batch():
    p = rows(6)
    places = [(0, 4), (1, 0), (2, 2), (0, 5), (1, 1), (2, 3)]
    requests, depths = [r for r, _ in places], [d for _, d in places]
    together = dice([1, 2, 3], [10, 20, 30], step=4).pick(p, draws(requests, depths)).tolist()
    alone = [
        int(dice([r + 1], [10 * (r + 1) + d - 1], step=d).pick(p[i : i + 1], draws([0], [1], Purpose.RECOVER)))
        for i, (r, d) in enumerate(places)
    ]
    assert together == alone
    [first, second] = dice([1, 2, 3], [10, 20, 30]).picks(draws(requests, depths), [2, 4], p.device)
    assert [*first(p[:2]).tolist(), *second(p[2:]).tolist()] == together


def test_rows_that_do_not_matter_cost_no_noise():
    made = dice([1, 2], [5, 5])
    picked = made.pick(rows(2), draws([0, 1], [0, 0], active=[False, True]))
    assert len(made._noise) == 1
    assert int(picked[1]) == int(dice([2], [5]).pick(rows(2)[1:], draws([0], [0])))


def test_several_picks_without_replacement_are_the_largest_in_order():
    p, where = rows(3), draws([0, 0, 0], [0, 1, 2])
    picked = dice([3], [8]).pick_many(p, 4, False, where)
    scores = p * torch.stack([noise_at(3, 8 + depth, VOCAB) for depth in range(3)])
    assert picked.tolist() == scores.argsort(descending=True)[:, :4].tolist()
    assert picked[:, 0].tolist() == dice([3], [8]).pick(p, where).tolist()
    few = torch.zeros(1, VOCAB)
    few[0, [2, 5]] = 0.5
    assert sorted(dice([3], [8]).pick_many(few, VOCAB + 2, False, draws([0], [0]))[0].tolist()) == [-1] * VOCAB + [2, 5]


def test_several_picks_with_replacement_race_once_and_are_independent_otherwise():
    p, where = rows(3), draws([0, 0, 0], [0, 1, 2])
    picked = dice([3], [8]).pick_many(p, 3, True, where)
    assert picked[:, 0].tolist() == dice([3], [8]).pick(p, where).tolist()
    others = PhiloxDice(seeds=[3], steps=[0]).pick_many(
        p, 2, True, Draws(requests=where.requests, slots=where.slots + 1, purpose=Purpose.DRAFT)
    )
    assert torch.equal(picked[:, 1:], others)


def test_rows_over_a_short_list_race_with_the_noise_of_their_tokens():
    ids = torch.tensor([1, 4, 6, 8])
    wide = torch.zeros(20, VOCAB)
    wide[:, ids] = rows(20)[:, :4]
    where = draws([0] * 20, list(range(20)))
    few = dice([3], [8]).over(ShortList.of(ids, VOCAB))
    expected = dice([3], [8]).pick(wide, where)
    assert ids[few.pick(wide[:, ids], where)].tolist() == expected.tolist()
    [pick] = few.picks(where, [20], wide.device)
    assert ids[pick(wide[:, ids])].tolist() == expected.tolist()


def test_a_weight_of_zero_never_wins_and_one_hot_rows_give_their_token():
    p = torch.zeros(200, VOCAB)
    p[:, 7] = 1
    assert set(dice([0], [0]).pick(p, draws([0] * 200, list(range(200)))).tolist()) == {7}


@pytest.mark.usefixtures("fewer_draws")
def test_the_dice_keep_their_law_and_agree_as_often_as_it_says():
    found = dice_law(VOCAB, coupled_dice, shared=True)
    assert found.holds, (found.worst, found.p_value)
    assert "agreement of draft and target" in found.p_values


@pytest.mark.usefixtures("fewer_draws")
def test_dice_whose_draft_and_target_have_noise_of_their_own_do_not_agree_as_often():
    assert dice_law(VOCAB, step_dice, shared=True).p_values["agreement of draft and target"] < BOUND


def test_a_draw_for_no_place_in_the_text_is_an_error():
    nowhere = Draws(requests=np.array([0]), slots=np.array([0]), purpose=Purpose.RECOVER)
    with pytest.raises(ValueError, match="no place in the text"):
        dice([0], [0]).pick(rows(1), nowhere)
