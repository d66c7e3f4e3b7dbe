"""Engines over real transformers models that break the law are caught, and the walk over all runs is sound."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from outrider.core.dice import Purpose
from outrider.core.types import Request, Sampling
from outrider.engine.engine import Engine
from outrider.lengths.fixed import FixedLength
from outrider.lm.model import LanguageModel
from outrider.lm.recurrent import RecurrentModel
from outrider.proof.enumerate import World
from outrider.proof.runs import law_of_runs, plain_rows
from outrider.trees.chain import ChainTree
from outrider.trees.protocol import UnprunedTree
from tests.proof.tiny_runs import BOUND, PROMPT, SLOTS, drafter, engine, pair, tiny, walk
from tests.world.biased import AcceptsEverything

pytestmark = pytest.mark.usefixtures("float64_stays_float64")


@dataclass(frozen=True, kw_only=True)
class DraftsTheSameForAll(UnprunedTree):
    """A chain whose tokens are drawn once, for the first request of the batch."""

    @property
    def structure(self):
        return "chain"

    def choose(self, level, dice):
        drawn = ChainTree().choose(level, dice)
        first = np.flatnonzero(drawn.owners % 2 == 0).repeat(2)
        return replace(drawn, tokens=drawn.tokens[torch.from_numpy(first)])


def test_draws_that_two_requests_share_are_caught_though_each_alone_keeps_its_law():
    made = engine(
        tiny("llama"), drafter(), "token", DraftsTheSameForAll(), length=FixedLength(num_speculative_tokens=1)
    )
    prompts = [PROMPT, PROMPT]
    found = pair(made, prompts, most=2)
    for i in range(2):
        alone = {}
        for outputs, mass in found.outputs.items():
            alone[outputs[i]] = alone.get(outputs[i], 0.0) + mass
        row = plain_rows(made.parts.target.model, PROMPT)
        for output, mass in alone.items():
            assert mass == pytest.approx(row(())[output[0]] * row(output[:1])[output[1]], abs=BOUND)
    assert found.error > 1e-3


# What is wrong. A checker that passes one of these is broken.


class KeepsRejectedStates(RecurrentModel):
    """Takes the state after all drafted tokens for the state after the accepted ones, once it is `broken`."""

    broken = False

    def commit(self, paths):
        if not self.broken:
            return super().commit(paths)
        newest = {slot: self._slots[slot].borders[max(self._slots[slot].borders)] for slot in paths}
        super().commit(paths)
        for slot, state in newest.items():
            self._slots[slot].borders[self._slots[slot].length] = state


class LeavesKeysWhereTheyAre(LanguageModel):
    """Does not bring the keys and values of an accepted path together."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.cache.move = lambda moves: None


def keeping_rejected_states() -> Engine:
    target = KeepsRejectedStates(tiny("mamba2"), max_slots=SLOTS)
    target.broken = True
    return engine(target, drafter(), "block")


def leaving_keys_where_they_are() -> Engine:
    target = LeavesKeysWhereTheyAre(tiny("llama", 3), max_slots=SLOTS)
    return engine(target, drafter("llama", 3), "match", "dynamic:width=2,num_nodes=4")


def accepting_everything() -> Engine:
    return engine(tiny("llama"), drafter(), AcceptsEverything())


@pytest.mark.parametrize("wrong", [accepting_everything, keeping_rejected_states, leaving_keys_where_they_are])
def test_what_is_wrong_is_caught(wrong):
    assert walk(wrong(), most=4).error > 1e-3


# The walk itself.


def test_a_script_holds_where_rounding_makes_two_outcomes_of_one_or_one_of_two():
    a, b, c = ((0, Purpose.ACCEPT, slot) for slot in range(3))
    world = World(script={a: 1, b: 0})
    assert [world.choose((1, Purpose.DRAFT, 0), [(5, 1.0)]), world.choose(a, [(0, 0.25), (1, 0.75)])] == [5, 1]
    assert world.choose(b, [(0, 1.0)]) == 0
    assert (world.probability, world.others) == (0.75, [])
    assert world.choose(c, [(2, 0.5), (7, 0.5)]) == 2
    assert world.others == [{a: 1, b: 0, c: 7}]
    assert world.choose(a, [(0, 1.0)]) == 1
    assert world.probability == 0, "an outcome that cannot come any more"


def test_an_engine_gets_its_own_draws_back_and_must_have_room():
    made = engine(tiny("llama"), drafter())
    texts = []
    for _ in range(2):
        texts += [out.tokens for out in made.generate([PROMPT], max_new_tokens=8, sampling=Sampling(seed=3))]
        walk(made, most=2)
    assert texts[0] == texts[1]
    asked = Request(id="", prompt=PROMPT, max_new_tokens=2, sampling=Sampling())
    with pytest.raises(ValueError, match="49 requests cannot run at once in an engine with max_slots=48"):
        law_of_runs(made, [asked] * 49, [])
