"""A thousand requests of every kind through one engine, some of them cancelled and some failing; and long prompts."""

import gc
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.core.types import InputError, Request, Running, Sampling
from outrider.decoding.protocol import Parts
from outrider.drafters.none import NoDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine.engine import Engine
from outrider.engine.output import Output
from outrider.lengths.fixed import FixedLength
from outrider.lm.model import LanguageModel
from outrider.lm.protocol import Extension, Segment
from outrider.trees.chain import ChainTree
from outrider.trees.gumbel import GumbelTree
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.match import MatchVerifier
from outrider.verifiers.traversal import TraversalVerifier
from tests.engine.test_failures import Broken, Failing
from tests.world.models import CONTEXT, drafter_of, free_slots, target
from tests.world.parts import parts_of
from tests.world.tokenizers import letters
from tests.world.zoo import VOCAB

SLOTS = 8
WAVES = ("model", "ngram", "tree", "suffix", "none")
PER_WAVE = 180
PROMPTS = 20
EACH = 5
"""The thousand: five waves by hand, and as many outputs of `generate` as are missing."""


def wave_parts(wave: str, base: Parts) -> Parts:
    """The parts of a wave, over the one target and the one draft model."""
    parts = replace(base, drafter=NoDrafter(), tree=ChainTree(), verifier=MatchVerifier())
    if wave in ("model", "tree"):
        parts = replace(parts, drafter=base.drafter, verifier=BlockVerifier())
    if wave == "tree":
        parts = replace(parts, tree=GumbelTree(branching=(2, 1, 1)), verifier=TraversalVerifier())
    if wave in ("ngram", "suffix"):
        parts = replace(parts, drafter=drafter_of("ngram") if wave == "ngram" else SuffixDrafter(min_match=1))
    return parts


@dataclass(frozen=True)
class Fuse:
    """A logits processor that raises once the text is long."""

    length: int

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] > self.length:
            raise Broken("this request cannot go on")
        return scores


def anything(id: str, dice: random.Random) -> Request:
    """A request of random length and settings; one in forty carries what will break it."""
    size = dice.choice((1, 2, 3, 5, 8, 13, 30, 70))
    fuse = (Fuse(size + dice.randrange(5)),) if dice.random() < 0.025 else ()
    return Request(
        id=id,
        prompt=tuple(dice.randrange(3, VOCAB) for _ in range(size)),
        max_new_tokens=dice.choice((1, 2, 3, 5, 8, 13)),
        sampling=Sampling(
            temperature=dice.choice((0.0, 0.3, 0.7, 1.0)),
            top_p=dice.choice((1.0, 1.0, 0.8)),
            top_k=dice.choice((0, 0, 10)),
            repetition_penalty=dice.choice((1.0, 1.0, 1.0, 1.2)),
            presence_penalty=dice.choice((0.0, 0.0, 0.0, 0.5)),
            processors=fuse,
            seed=dice.randrange(1000),
        ),
        eos_ids=frozenset(dice.sample(range(VOCAB), dice.choice((0, 1, 3)))),
        stop=tuple(chr(0x4E00 + dice.randrange(VOCAB)) for _ in range(dice.choice((0, 0, 2)))),
    )


def wave(engine: Engine, these: Sequence[Request], dice: random.Random) -> dict[str, Output]:
    """All of them, joining a few per step; one step in thirty sees a cancellation, one in thirty wrong input."""
    waiting, found = list(these), {}
    while waiting or engine.busy:
        for _ in range(min(len(waiting), dice.choice((0, 1, 2, 4)))):
            engine.add(waiting.pop())
        if dice.random() < 1 / 30:
            with pytest.raises(InputError):
                engine.add(dice.choice(([], [VOCAB + 1], [3] * CONTEXT)))
        if dice.random() < 1 / 30:
            there = dice.choice(these).id
            cancelled = engine.cancel(there)
            found |= {there: cancelled} if cancelled is not None else {}
        found |= {update.id: update.output for update in engine.step() if update.output is not None}
    return found


def num_alive() -> int:
    gc.collect()
    return sum(type(thing) is Running for thing in gc.get_objects())


@pytest.mark.usefixtures("float64_stays_float64")
def test_a_thousand_requests_through_one_engine_leave_nothing_behind_and_get_what_they_get_alone():
    dice, breaks = random.Random(0), random.Random(1)
    alive = num_alive()
    base = parts_of(target(SLOTS), drafter_of("model", SLOTS), verifier=BlockVerifier())
    tokenizer = letters()
    engine = Engine(base, tokenizer=tokenizer, max_slots=SLOTS)
    caches = (base.target, base.drafter.lm)
    engine.generate([[3] * (CONTEXT - 6)] * SLOTS, max_new_tokens=5)
    warm = [lm.num_bytes for lm in caches]
    count = 0
    for name in WAVES:
        these = [anything(f"{name} {i}", dice) for i in range(PER_WAVE)]
        fine = wave_parts(name, base)
        engine.rest()
        calls = {(call, breaks.randrange(10, 200)) for call in ("begin", "expand", "commit", "observe", "open")}
        engine.parts = replace(fine, drafter=Failing(inner=fine.drafter, when=calls))
        outputs = wave(engine, these, dice)
        engine.rest()
        assert set(outputs) == {request.id for request in these}
        reasons = [output.finish_reason for output in outputs.values()]
        assert all(reasons.count(reason) > 0 for reason in ("length", "stop", "error")), (name, reasons)
        assert all(isinstance(output.error, Broken) for output in outputs.values() if output.finish_reason == "error")
        alone = Engine(fine, tokenizer=tokenizer, max_slots=1)
        for request in dice.sample(these, 10):
            if outputs[request.id].finish_reason in ("length", "stop"):
                alone.add(request)
                while alone.busy:
                    [update] = alone.step()
                assert update.output.tokens == outputs[request.id].tokens, request
                assert update.output.text == outputs[request.id].text, request
                alone.rest()
        count += len(outputs)
    engine.parts = base
    prompts = [[dice.randrange(3, VOCAB) for _ in range(dice.randrange(1, 30))] for _ in range(PROMPTS)]
    made = engine.generate(prompts, n=EACH, max_new_tokens=5, sampling=Sampling(temperature=0.8, seed=3))
    count += len(made)
    assert count == 1000
    assert {len(output.tokens) for output in made} == {5}
    engine.rest()
    assert [lm.num_bytes for lm in caches] == warm
    assert [len(lm._slots) + len(lm.cache._row_of) + len(lm.cache._used) for lm in caches] == [0, 0]
    waiting = engine._schedule.waiting
    assert (len(engine._schedule.seats), len(waiting), len(engine._schedule.prefixes)) == (0, 0, 0)
    assert free_slots(engine) == [SLOTS, SLOTS]
    # What is left alive would be held by somebody; tracebacks of errors do.
    del outputs, made, update
    assert num_alive() == alive


class Counting(LanguageModel):
    """Notes how many tokens each forward over prompts had."""

    def extend(self, segments: Sequence[Segment], taps: Sequence[int] = ()) -> Extension:
        self.num_read = getattr(self, "num_read", 0)
        if segments[0].logits == "none":
            self.num_read += sum(len(s.tokens) for s in segments)
        return super().extend(segments, taps)


@pytest.fixture(scope="module")
def long_context() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=4608,
    )
    return LlamaForCausalLM(config)


@pytest.mark.parametrize(
    ("prompts", "given", "most"), [((4000,), None, 512), ((1300,) * 5, 512, 512), ((1000, 900, 1), 100, 100)]
)
def test_long_prompts_hold_up_no_step_of_others(long_context, prompts, given, most):
    lm = Counting(long_context, max_slots=8)
    parts = parts_of(lm, NoDrafter(), verifier=MatchVerifier(), length=FixedLength())
    engine = Engine(parts, max_prefill_tokens=given)
    greedy = Sampling(temperature=0, seed=0)
    decoding = [engine.add([3, 4, 5 + i], max_new_tokens=500, sampling=greedy) for i in range(3)]
    engine.step()
    arriving = {engine.add([7] * size, max_new_tokens=3, sampling=greedy): size for size in prompts}
    needed = -(-sum(size - 1 for size in prompts) // most)
    first: dict[str, int] = {}
    for step in range(1, needed + 2):
        lm.num_read = 0
        updated = [update.id for update in engine.step()]
        assert set(decoding) <= set(updated), step
        assert lm.num_read <= most
        first |= {id: step for id in updated if id in arriving and id not in first}
    assert set(first) == set(arriving), (first, needed)


def test_a_bound_on_prefill_of_no_tokens_is_refused(long_context):
    with pytest.raises(InputError, match="max_prefill_tokens must be >= 1, got 0"):
        Engine(
            parts_of(LanguageModel(long_context), NoDrafter(), verifier=MatchVerifier(), length=FixedLength()),
            max_prefill_tokens=0,
        )
