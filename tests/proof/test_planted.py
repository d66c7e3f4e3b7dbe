"""Faults that are planted in the package, each caught by a check of `prove`: the table of docs/prove.md."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.core.dice import _LANES, PhiloxDice, Purpose, inverse_cdf
from outrider.core.nucleus import nucleus_floor
from outrider.core.sampling import RowRule, to_rows
from outrider.core.types import InputError
from outrider.decoding.reading import Reading
from outrider.engine.engine import Engine
from outrider.lm.model import LanguageModel
from outrider.lm.slots.cache import SlotCache
from outrider.proof.draws import dice_law
from outrider.proof.gate import gate, in_float32
from outrider.proof.nodes import COARSE, compare_nodes
from outrider.proof.pair import LAW_BOUND, how_it_computes, prove
from outrider.proof.plain import is_exact
from outrider.proof.rule import law_error
from outrider.proof.statistics import sampled_law
from outrider.trees.dynamic import DynamicTree
from outrider.verifiers.match import MatchVerifier
from outrider.verifiers.protocol import child_rows, recover
from tests.world.models import engine, llama

PROMPTS = [[1, 2, 1, 2], [1], [2, 3]]
PAGE = Path(__file__).parents[2] / "docs" / "prove.md"
Plant = Callable[[pytest.MonkeyPatch], None]


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
    honest = Reading._before

    def before(self, states):
        found, parents = honest(self, states), self.draft.parents
        above = np.where(parents >= 0, parents, np.arange(len(parents)))
        return replace(found, paths=found.paths[above], lengths=found.lengths[above])

    patch.setattr(Reading, "_before", before)


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


MUTANTS: dict[str, tuple[Plant, str]] = {
    "accepts 2 % too often": (accepts_too_often(0.02), "dice"),
    "accepts 25 % too often": (accepts_too_often(0.25), "dice"),
    "picks with u^1.05": (uniforms_to_a_power, "dice"),
    "one random number for draft and recovery": (one_stream_for_two_purposes, "dice"),
    "the same random numbers in every step": (the_same_numbers_in_every_step, "dice"),
    "logits times 1.05 on both sides": (scaled_logits, "rows"),
    "top-p times 0.8": (shrunk_top_p, "rows"),
    "penalties read another node's text": (penalties_of_the_parent, "rows"),
    "the first request's settings for the batch": (the_first_settings_for_all, "rows"),
    "logits of blocks off by 0.02": (shifted_logits_of_blocks, "rows"),
    "a wrong position at one depth": (a_wrong_position_at_one_depth, "rows"),
    "keys of a rejected branch stay in the cache": (keys_of_another_path, "rows"),
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


def passes(check: str, made: Engine) -> bool:
    """Whether an engine passes a check of `prove`."""
    if check == "dice":
        found = dice_law(made.parts.target.vocab_size)
        print(found.worst, found.p_value)
        return found.holds
    if check == "rows":
        nodes = compare_nodes(made, PROMPTS, 8)
        print(nodes)
        return nodes.holds
    error = law_error(made.parts)
    print(error)
    return error < LAW_BOUND


@pytest.mark.parametrize("name", MUTANTS)
def test_what_is_planted_is_caught(monkeypatch, name):
    plant, check = MUTANTS[name]
    made = bushy() if "branch" in name else pair()
    plant(monkeypatch)
    assert not passes(check, made)


@pytest.mark.parametrize("check", ["dice", "rows", "exact law"])
def test_what_is_right_passes(check):
    assert all(passes(check, made) for made in ([pair()] if check == "dice" else [pair(), bushy()]))


def test_the_page_has_every_planted_fault_with_its_check():
    rows = re.findall(r"^\| ([^|]+) \| `[^|]+` \| \*\*([^|]+)\*\* \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert dict(rows) == {name: check for name, (_, check) in MUTANTS.items()}


def test_a_pair_with_a_planted_fault_is_not_proven(monkeypatch):
    made = pair()
    shifted_logits_of_blocks(monkeypatch)
    found = prove(made, num_draws=0)
    assert found.exact_law
    assert found.dice.holds
    assert (found.nodes.holds, found.holds) == (False, False)


def test_the_gate_prints_no_speedup_of_a_fault_that_greedy_texts_hide(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    the_first_settings_for_all(monkeypatch)
    with pytest.raises(InputError, match="rows at drafts of this pair are not those of transformers"):
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
