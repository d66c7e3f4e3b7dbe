"""Faults that are planted in the package, each caught by a check of `prove`: the table of docs/guide/prove.md."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.core.dice import _LANES, PhiloxDice, Purpose, inverse_cdf
from outrider.core.nucleus import nucleus_floor
from outrider.core.sampling import RowRule, _Group, to_rows
from outrider.core.types import InputError
from outrider.decoding import drafting
from outrider.decoding.reading import TargetReading
from outrider.engine import prefixes
from outrider.engine.engine import Engine
from outrider.lm.model import LanguageModel
from outrider.lm.slots.cache import SlotCache
from outrider.proof.draws import dice_law_of
from outrider.proof.gate import gate, in_float32
from outrider.proof.nodes import COARSE, SHARED, compare_nodes
from outrider.proof.pair import LAW_BOUND, how_it_computes, prove
from outrider.proof.plain import is_exact
from outrider.proof.rule import law_error
from outrider.proof.statistics import sampled_law
from outrider.trees.dynamic import DynamicTree
from outrider.trees.gumbel import GumbelTree
from outrider.verifiers import walk
from outrider.verifiers.match import MatchVerifier
from outrider.verifiers.protocol import child_rows, everyone, recover
from outrider.verifiers.recursive import RecursiveVerifier
from tests.world.models import engine, llama

PROMPTS = [[1, 2, 1, 2], [1], [2, 3]]
PAGE = Path(__file__).parents[2] / "docs" / "guide" / "prove.md"
Plant = Callable[[pytest.MonkeyPatch], None]
FEWER = pytest.mark.usefixtures("fewer_draws")


def accepts_too_often(share: float) -> Plant:
    honest = PhiloxDice.accept
    return lambda patch: patch.setattr(
        PhiloxDice, "accept", lambda self, probability, draws: honest(self, probability * (1 + share), draws)
    )


def uniforms_to_a_power(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("outrider.core.dice.inverse_cdf", lambda weights, uniforms: inverse_cdf(weights, uniforms**1.05))


def one_stream_for_two_purposes(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(_LANES, Purpose.RECOVER, 0)


def the_same_numbers_in_every_step(patch: pytest.MonkeyPatch) -> None:
    dice = PhiloxDice
    patch.setattr("outrider.decoding.step.PhiloxDice", lambda seeds, steps: dice(seeds=seeds, steps=[0] * len(steps)))


def scaled_logits(patch: pytest.MonkeyPatch) -> None:
    honest = RowRule._scores
    patch.setattr(RowRule, "_scores", lambda self, logits, before, masks: honest(self, logits, before, masks) * 1.05)


def shrunk_top_p(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        "outrider.core.sampling.nucleus_floor",
        lambda rows, top_p, spare: nucleus_floor(rows, torch.where(top_p < 1, top_p * 0.8, top_p), spare),
    )


def penalties_of_the_parent(patch: pytest.MonkeyPatch) -> None:
    honest = TargetReading._before

    def before(self, states):
        found, parents = honest(self, states), self.draft.parents
        above = np.where(parents >= 0, parents, np.arange(len(parents)))
        return replace(found, paths=found.paths[above], lengths=found.lengths[above])

    patch.setattr(TargetReading, "_before", before)


def the_first_settings_for_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        "outrider.decoding.reading.to_rows",
        lambda logits, owners, samplings, before, masks: to_rows(
            logits, owners, [samplings[0]] * len(samplings), before, masks
        ),
    )


def shifted_logits_of_blocks(patch: pytest.MonkeyPatch) -> None:
    honest = LanguageModel._forward

    def forward(self, inputs, taps):
        made = honest(self, inputs, taps)
        return replace(made, logits=made.logits + 0.02) if inputs.positions.shape[1] > 1 else made

    patch.setattr(LanguageModel, "_forward", forward)


def a_wrong_position_at_one_depth(patch: pytest.MonkeyPatch) -> None:
    honest = LanguageModel._forward

    def forward(self, inputs, taps):
        third = torch.arange(inputs.positions.shape[1]) == 2
        return honest(self, replace(inputs, positions=inputs.positions + third), taps)

    patch.setattr(LanguageModel, "_forward", forward)


def keys_of_another_path(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotCache, "move", lambda self, moves: None)


def copies_that_fail(patch: pytest.MonkeyPatch) -> None:
    def copy(self, source, target, length):
        raise IndexError("there is no such row\nin this storage")

    patch.setattr(SlotCache, "copy", copy)


def an_unclipped_residual(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        "outrider.verifiers.protocol.residual", lambda target_rows, draft_rows: (target_rows - draft_rows).abs()
    )


def a_bonus_from_the_draft(patch: pytest.MonkeyPatch) -> None:
    def wrong(draft, dice, target_rows, last, rejected, weight=None):
        drafted = child_rows(draft, np.maximum(last - 1, draft.offsets[:-1]), target_rows[:1])
        rows = target_rows.clone()
        rows[torch.from_numpy(last[~rejected])] = drafted[torch.from_numpy(~rejected)]
        return recover(draft, dice, rows, last, rejected, weight)

    patch.setattr("outrider.verifiers.token.recover", wrong)


def one_number_for_accept_and_recover(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(_LANES, Purpose.RECOVER, _LANES[Purpose.ACCEPT])


def coins_draft_in_a_later_slot(by: int) -> Plant:
    honest = PhiloxDice._uniform

    def uniform(self, request, slot, purpose):
        late = purpose is Purpose.DRAFT and slot >= by
        return honest(self, request, slot - by, Purpose.ACCEPT) if late else honest(self, request, slot, purpose)

    return lambda patch: patch.setattr(PhiloxDice, "_uniform", uniform)


def one_seed_for_all_outputs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("outrider.engine.engine.nth", lambda sampling, k: sampling)


def a_beginning_one_token_too_long(patch: pytest.MonkeyPatch) -> None:
    honest = prefixes._shared
    patch.setattr(prefixes, "_shared", lambda ours, theirs, most: min(most, honest(ours, theirs, most) + 1))


def copies_without_the_last_position(patch: pytest.MonkeyPatch) -> None:
    honest = SlotCache.copy

    def copy(self, source, target, length):
        honest(self, source, target, length - 1)
        self._used[target] = length

    patch.setattr(SlotCache, "copy", copy)


def rows_of_later_drafters_stay(patch: pytest.MonkeyPatch) -> None:
    honest = drafting._selected

    def selected(drafts, which, structure):
        chosen = [(drafts[each], r) for r, each in enumerate(which)]
        own = [draft.row_of[draft.offsets[r] : draft.offsets[r + 1]] for draft, r in chosen]
        return replace(honest(drafts, which, structure), row_of=np.concatenate(own))

    patch.setattr(drafting, "_selected", selected)


def the_first_groups_settings(patch: pytest.MonkeyPatch) -> None:
    honest = _Group.of

    def of(rows, per_row, like, filters):
        first = slice(0, len(per_row[rows]))
        return replace(honest(first, per_row, like, filters), rows=rows)

    patch.setattr(_Group, "of", of)


def one_coin_for_siblings(patch: pytest.MonkeyPatch) -> None:
    honest = walk.brood

    def brood(draft, requests, nodes):
        found = honest(draft, requests, nodes)
        return replace(found, slots=np.repeat(found.slots[:, :1], found.slots.shape[1], 1))

    patch.setattr(walk, "brood", brood)


def one_coin_for_all_depths(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("outrider.verifiers.token.everyone", lambda draft, slot, purpose: everyone(draft, 0, purpose))


MUTANTS: dict[str, tuple[Plant, str]] = {
    "accepts 2 % too often": (accepts_too_often(0.02), "dice"),
    "accepts 25 % too often": (accepts_too_often(0.25), "dice"),
    "picks with u^1.05": (uniforms_to_a_power, "dice"),
    "one random number for draft and recovery": (one_stream_for_two_purposes, "dice"),
    "one random number for accept and recover": (one_number_for_accept_and_recover, "dice"),
    "the coin of a slot drafts in the next slot": (coins_draft_in_a_later_slot(1), "dice"),
    "the coin of a slot drafts eight slots later": (coins_draft_in_a_later_slot(8), "dice"),
    "one seed for all outputs of a prompt": (one_seed_for_all_outputs, "dice"),
    "the same random numbers in every step": (the_same_numbers_in_every_step, "dice"),
    "logits times 1.05 on both sides": (scaled_logits, "rows"),
    "top-p times 0.8": (shrunk_top_p, "rows"),
    "penalties read another node's text": (penalties_of_the_parent, "rows"),
    "the first request's settings for the batch": (the_first_settings_for_all, "rows"),
    "logits of blocks off by 0.02": (shifted_logits_of_blocks, "rows"),
    "a wrong position at one depth": (a_wrong_position_at_one_depth, "rows"),
    "keys of a rejected branch stay in the cache": (keys_of_another_path, "rows"),
    "a shared beginning one token too long": (a_beginning_one_token_too_long, "rows"),
    "a copied slot lacks its last position": (copies_without_the_last_position, "rows"),
    "the first group's settings for all groups of rows": (the_first_groups_settings, "rows"),
    "rows of later drafters are not moved": (rows_of_later_drafters_stay, "exact law"),
    "one coin for the siblings of a branch": (one_coin_for_siblings, "exact law"),
    "one coin for all depths": (one_coin_for_all_depths, "exact law"),
    "a residual that is not clipped": (an_unclipped_residual, "exact law"),
    "a bonus token from the draft's row": (a_bonus_from_the_draft, "exact law"),
}


def pair(**others: object) -> Engine:
    """A tiny pair."""
    made = engine("model", "token")
    return Engine(replace(made.parts, **others), max_slots=made.max_slots)


def bushy() -> Engine:
    """The same with drafts that branch."""
    return pair(tree=DynamicTree(width=3, num_nodes=6), verifier=MatchVerifier())


def drawn() -> Engine:
    """The same with drafts whose branches are drawn."""
    return pair(tree=GumbelTree(branching=(2, 2)), verifier=RecursiveVerifier())


def passes(check: str, made: Engine) -> bool:
    """Whether an engine passes a check of `prove`."""
    if check == "dice":
        found = dice_law_of(made)
        print(found.worst, found.p_value)
        return found.holds
    if check == "rows":
        nodes = compare_nodes(made, PROMPTS, 8)
        print(nodes)
        return nodes.holds
    try:
        error = law_error(made.parts)
    except RuntimeError as reason:
        # `prove` makes a verdict of it: see below.
        error = str(reason)
    print(error)
    return not isinstance(error, str) and error < LAW_BOUND


@pytest.mark.parametrize("name", MUTANTS)
def test_what_is_planted_is_caught(monkeypatch, name):
    plant, check = MUTANTS[name]
    made = drawn() if "siblings" in name else bushy() if "branch" in name else pair()
    plant(monkeypatch)
    assert not passes(check, made)


@pytest.mark.parametrize("check", ["dice", "rows", "exact law"])
def test_what_is_right_passes(check):
    assert all(passes(check, made) for made in ([pair()] if check == "dice" else [pair(), bushy(), drawn()]))


def test_the_page_has_every_planted_fault_with_its_check():
    rows = re.findall(r"^\| ([^|]+) \| `[^|]+` \| \*\*([^|]+)\*\* \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert dict(rows) == {name: check for name, (_, check) in MUTANTS.items()}


@FEWER
def test_a_pair_with_a_planted_fault_is_not_proven(monkeypatch):
    made = pair()
    shifted_logits_of_blocks(monkeypatch)
    found = prove(made, num_draws=0)
    assert found.exact_law
    assert found.dice.holds
    assert (found.nodes.holds, found.holds) == (False, False)


TWICE = "it ended with RuntimeError: the random number of slot . for ACCEPT was used twice in one step"


@FEWER
@pytest.mark.parametrize(
    ("plant", "make", "check", "sentence"),
    [
        (one_coin_for_siblings, drawn, "exact law", TWICE),
        (one_coin_for_all_depths, pair, "exact law", TWICE),
        (copies_that_fail, pair, "rows", "it ended with IndexError: there is no such row in this storage"),
    ],
    ids=["siblings", "depths", "copies"],
)
def test_an_error_in_a_check_is_a_verdict(monkeypatch, plant, make, check, sentence):
    made = make()
    plant(monkeypatch)
    found = prove(made, num_draws=0)
    assert list(found.errors) == [check]
    assert re.fullmatch(sentence, found.errors[check])
    assert not found.holds


@FEWER
def test_what_cannot_be_checked_is_still_refused(monkeypatch):
    def refuse(parts):
        raise InputError("no")

    monkeypatch.setattr("outrider.proof.pair.law_error", refuse)
    with pytest.raises(InputError, match="no"):
        prove(pair(), num_draws=0)


def test_prompts_of_the_rows_take_over_slots_and_copies():
    nodes = compare_nodes(pair(), PROMPTS, 2)
    assert nodes.num_reused == sum(SHARED)
    alone = Engine(pair().parts, max_slots=1, keep_warm=False)
    assert compare_nodes(alone, PROMPTS, 2).num_reused == 0


@FEWER
def test_the_gate_prints_no_speedup_of_a_fault_that_greedy_texts_hide(monkeypatch, tmp_path):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    the_first_settings_for_all(monkeypatch)
    with pytest.raises(InputError, match="rows at drafts of this pair are not those of transformers"):
        gate(pair())


@FEWER
def test_an_error_in_a_check_of_the_gate_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    copies_that_fail(monkeypatch)
    with pytest.raises(InputError, match="a check of this pair failed: it ended with IndexError: there is no such row"):
        gate(pair())


def test_few_samples_show_coins_that_land_too_often(monkeypatch):
    accepts_too_often(0.25)(monkeypatch)
    found = sampled_law(pair(), PROMPTS, 300)
    print(found.p_value, found.test, found.likely, found.liked)
    assert found.liked.z > 4
    assert found.liked.p_value < found.test.p_value


def test_what_is_not_cast_is_not_called_float32():
    model = llama().bfloat16()
    target = LanguageModel(model, max_slots=8)
    assert not is_exact(target)
    model.is_quantized = True
    made = in_float32(pair(target=target))
    assert made.parts.target is target
    assert how_it_computes(target) == "bfloat16 with quantised weights, which are not cast to float32"
    assert compare_nodes(made, PROMPTS, 4).bound == COARSE
