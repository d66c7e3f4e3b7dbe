"""The law of requests that are served one after another by a draft model that learns from each of them.

Every outcome of every draw is a run of its own. What the draft model has learnt before the second request depends on
the draws of the first one.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.core.dice import Dice
from outrider.core.types import Draft, Request, Sampling, Verdict
from outrider.decoding.step import StepDecoding
from outrider.drafters.model import ModelDrafter
from outrider.engine.engine import Engine
from outrider.lengths.fixed import FixedLength
from outrider.lm.model import LanguageModel
from outrider.lm.tabular import TabularLM, random_rows
from outrider.proof.enumerate import EnumeratingDice, World, law
from outrider.training.online.learning import Learning
from outrider.training.online.pupil import OnlineSettings
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.protocol import Verifier
from outrider.verifiers.token import TokenVerifier
from tests.world.tables import tables
from tests.world.zoo import scrambled

BOUND = 1e-12
TABLE = random_rows(2, seed=3)
REQUESTS = [
    Request(id=str(i), prompt=prompt, max_new_tokens=tokens, sampling=Sampling(seed=0))
    for i, (prompt, tokens) in enumerate([((0, 1, 1), 3), ((1, 0), 2)])
]
VERIFIERS = {"token": TokenVerifier(), "block": BlockVerifier()}


@cache
def draft_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=2, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, eos_token_id=None
    )
    return scrambled(LlamaForCausalLM(config).double())


def engine(verifier: Verifier) -> Engine:
    drafter = ModelDrafter(lm=LanguageModel(draft_model(), max_slots=1, max_context=16))
    parts = replace(tables(2, verifier, target=TabularLM(TABLE, 2), drafter=drafter), decoding=StepDecoding())
    return Engine(replace(parts, length=FixedLength(num_speculative_tokens=2)), max_slots=1)


def outputs_of(serve: Callable[[World], tuple[tuple[int, ...], ...]]) -> dict[tuple[tuple[int, ...], ...], float]:
    """The probability of each joint output, over all outcomes of all draws."""
    waiting: list[dict] = [{}]
    found: dict[tuple[tuple[int, ...], ...], float] = defaultdict(float)
    while waiting:
        world = World(script=waiting.pop())
        found[serve(world)] += world.probability
        waiting += world.others
    return found


def plain() -> Mapping[tuple[tuple[int, ...], ...], float]:
    """The same for plain decoding."""
    found = {}
    for outputs in product(*(product(range(2), repeat=each.max_new_tokens) for each in REQUESTS)):
        mass = 1.0
        for request, output in zip(REQUESTS, outputs, strict=True):
            for i, token in enumerate(output):
                mass *= float(TABLE((*request.prompt, *output[:i]))[token])
        found[outputs] = mass
    return found


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_draft_model_that_learns_from_what_was_rejected_keeps_the_law_of_later_requests(name):
    drafted: set[tuple[float, ...]] = set()
    rounds, accepted = [], []

    def serve(world: World) -> tuple[tuple[int, ...], ...]:
        busy = engine(VERIFIERS[name])
        learning = Learning(busy, OnlineSettings(interval=1, learning_rate=0.1, margin=None))
        busy.dice = lambda states: EnumeratingDice([world], [(state.request.id, state.num_steps) for state in states])
        noted = busy.watch

        def watch(cycle):
            noted(cycle)
            if cycle.states[0].request.id == "1" and cycle.draft.rows is not None:
                drafted.add(tuple(cycle.draft.rows[0].tolist()))
            accepted.append(int(cycle.verdict.num_accepted[0]))

        busy.watch = watch
        outputs = []
        for request in REQUESTS:
            busy.add(request)
            while busy.busy:
                outputs += [tuple(update.output.tokens) for update in busy.step() if update.output is not None]
        rounds.append(learning.pupils[0].draft.num_rounds)
        return tuple(outputs)

    found, expected = outputs_of(serve), plain()
    assert sum(found.values()) == pytest.approx(1, abs=1e-12)
    assert max(abs(found.get(key, 0.0) - expected[key]) for key in expected) < BOUND
    # The weights of the second request follow from the draws of the first one.
    assert len(drafted) > 2
    assert max(rounds) == 2
    assert max(accepted) > 0


@dataclass(frozen=True, kw_only=True)
class JudgesByNewWeights:
    """Verifies draft tokens by rows of weights that came after they were drawn."""

    inner: Verifier

    def verify(self, draft: Draft, target_rows: torch.Tensor, dice: Dice) -> Verdict:
        rows = None if draft.rows is None else draft.rows.square() / draft.rows.square().sum(-1, keepdim=True)
        return self.inner.verify(replace(draft, rows=rows), target_rows, dice)


@pytest.mark.parametrize("name", VERIFIERS)
def test_new_weights_inside_a_step_are_caught(name):
    prompt: Sequence[int] = [1]
    assert law(tables(2, VERIFIERS[name]), prompt, num_steps=2).error < BOUND
    assert law(tables(2, JudgesByNewWeights(inner=VERIFIERS[name])), prompt, num_steps=2).error > 1e-3
