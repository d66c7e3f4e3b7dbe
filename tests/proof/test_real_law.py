"""The law of engines over real transformers models: every run, from its prompt to its end, against plain forwards."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from jaxtyping import Float
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from outrider import as_custom_generate
from outrider.core.dice import Dice
from outrider.decoding.pearl import PearlDecoding
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.engine.engine import Engine
from outrider.integrate.kept import borrowed
from outrider.lengths.adaedl import AdaedlLength
from outrider.lengths.fixed import FixedLength
from outrider.lm.forwards.packed import keeps_bits
from outrider.lm.model import LanguageModel
from outrider.lm.open import as_lm
from outrider.lm.recurrent import RecurrentModel
from outrider.lm.translated import Translated
from outrider.lm.vocabulary import Translation
from outrider.proof.enumerate import EnumeratingDice, World
from outrider.proof.runs import Row, plain_rows
from tests.proof.tiny_runs import BOUND, PROMPT, SLOTS, assert_lossless, drafter, engine, pair, tiny, walk
from tests.world.automaton import After

pytestmark = pytest.mark.usefixtures("float64_stays_float64")


@pytest.mark.parametrize(
    ("verifier", "tree", "vocab", "most"),
    [
        ("token", "chain", 2, 5),
        ("block", "chain", 3, 3),
        ("recursive", "gumbel:branching=2x1", 3, 3),
        ("traversal", "gumbel:branching=2x1", 3, 2),
        ("kseq", "iid:num_paths=2", 2, 3),
        ("match", "dynamic:width=2,num_nodes=4", 3, 4),
    ],
)
def test_a_llama_keeps_its_law(verifier, tree, vocab, most):
    assert_lossless(walk(engine(tiny("llama", vocab), drafter("llama", vocab), verifier, tree), most=most))


@pytest.mark.parametrize(
    ("target", "draft"),
    [("mamba2", "llama"), ("qwen3_next", "llama"), ("mamba", "mamba"), ("recurrent_gemma", "llama")],
)
def test_a_recurrent_target_keeps_its_law_where_drafts_are_rejected(target, draft):
    made = engine(tiny(target), drafter(draft))
    assert_lossless(walk(made, most=4))
    assert made.parts.target.num_replays > 0 or made.parts.target.stepwise


@pytest.mark.parametrize("draft", ["mamba2", "mamba", "qwen3_next"])
def test_a_recurrent_draft_model_keeps_the_law(draft):
    assert_lossless(walk(engine(tiny("llama"), drafter(draft), "token"), most=4))


@pytest.mark.parametrize(
    ("name", "tree", "verifier"),
    [
        ("mistral", "chain", "block"),
        ("gemma2", "gumbel:branching=2x1", "recursive"),
        ("llama4", "iid:num_paths=2", "recursive"),
    ],
)
def test_a_window_that_is_passed_within_a_draft_keeps_the_law(name, tree, verifier):
    prompt = (1, 0, 1, 1, 0, 0, 1)
    made = engine(tiny(name), drafter(), verifier, tree)
    assert len(prompt) < 8 < len(prompt) + 3, "the windows are 8 tokens long"
    assert_lossless(walk(made, prompt, most=3))


WORDS = Translation(
    vocab_size=3,
    ours=np.array([0, 2]),
    theirs=np.array([3, 1]),
    pieces=lambda token: {0: (3,), 1: (0, 2), 2: (1,)}[token],
)
"""A target of three tokens, two of which a draft model of four has too; the other one has two pieces there."""


@pytest.mark.parametrize("draft", ["llama", "mamba2"])
def test_a_draft_model_with_another_vocabulary_keeps_the_law(draft):
    guesser = ModelDrafter(lm=Translated(as_lm(tiny(draft, 4, seed=50), max_slots=SLOTS), WORDS))
    assert_lossless(walk(engine(tiny("llama", 3), guesser), (1, 0, 2, 1), most=3))


def constrained(model: PreTrainedModel, rule: After, prompt: Sequence[int]) -> Row:
    """Plain decoding under a constraint: what is forbidden goes, the rest is scaled up again."""
    plain = plain_rows(model, prompt)

    def row(output: tuple[int, ...]) -> Float[np.ndarray, " vocab"]:
        kept = np.where(rule.allowed(output), plain(output), 0.0)
        return kept / kept.sum()

    return row


@pytest.mark.parametrize(("target", "tree"), [("llama", "gumbel:branching=2x1"), ("qwen3_next", "chain")])
def test_a_constraint_that_begins_inside_a_draft_keeps_its_law(target, tree):
    rule = After(vocab=3, followers={2: frozenset({0, 1}), 0: frozenset({1, 2})})
    made = engine(tiny(target, 3), drafter("llama", 3), "recursive" if tree != "chain" else "block", tree)
    rows = constrained(made.parts.target.model, rule, PROMPT)
    found = walk(made, most=3, rows=rows, constraint=rule)
    assert_lossless(found)
    assert all(rule.fits(output) for (output,) in found.outputs)


@pytest.mark.parametrize("target", ["llama", "mamba2"])
def test_outputs_that_end_keep_their_law(target):
    found = walk(engine(tiny(target, 3), drafter("llama", 3), "token"), most=3, eos_ids=frozenset({2}))
    assert_lossless(found)
    assert {len(output) for (output,) in found.outputs} == {1, 2, 3}


@pytest.mark.parametrize("target", ["llama", "qwen3_next"])
def test_prompts_that_are_prefilled_in_pieces_beside_requests_that_decode_keep_the_law(target):
    parts = engine(tiny(target), drafter(), "token").parts
    assert_lossless(walk(Engine(parts, max_slots=SLOTS, max_prefill_tokens=2), most=3))


@pytest.mark.parametrize(
    "others",
    [
        {"length": AdaedlLength(num_speculative_tokens=2, threshold=0.5, epsilon=0.2)},
        {"drafter": NgramDrafter(prompt_lookup_min=1)},
    ],
    ids=["adaedl", "ngram"],
)
def test_a_stopping_rule_and_chosen_drafts_keep_the_law(others):
    assert_lossless(walk(engine(tiny("llama"), drafter(), "block", **others), most=4))


@pytest.mark.parametrize(("target", "draft", "verifier"), [("llama", "llama", "block"), ("mamba2", "mamba2", "token")])
def test_pearl_in_two_threads_keeps_the_law_and_gives_what_its_simulated_clock_gives(target, draft, verifier):
    model, guesser, most = tiny(target), drafter(draft), 4 if target == "llama" else 3
    both = [
        walk(engine(model, guesser, verifier, decoding=PearlDecoding(clock=clock)), most=most)
        for clock in ("real", "simulated")
    ]
    assert_lossless(both[0])
    assert both[0] == both[1]


def test_packed_weights_change_no_bit_of_the_law(monkeypatch):
    monkeypatch.undo()  # Casts do here what they say: the fixture's float64 is not for bfloat16.
    model, draft = (tiny("llama", seed=seed).bfloat16() for seed in (0, 50))
    if not keeps_bits(model.device, model.dtype):
        pytest.skip("this CPU has no kernels for bfloat16")
    both = [
        walk(
            engine(
                as_lm(model, max_slots=SLOTS, forward=forward),
                ModelDrafter(lm=as_lm(draft, max_slots=SLOTS, forward=forward)),
            )
        )
        for forward in ("eager", "packed")
    ]
    assert both[0] == both[1]
    assert both[1].error < 0.02


@pytest.mark.parametrize("target", ["llama", "qwen3_next"])
def test_two_requests_in_one_batch_have_the_product_of_their_laws(target):
    made = engine(tiny(target), drafter(), "token", length=FixedLength(num_speculative_tokens=1))
    assert_lossless(pair(made, [PROMPT, (0, 1)], most=3 if target == "llama" else 2))


# Steps that fail.


def stumbling(kind: type) -> type:
    """A model every third of whose forwards over several requests fails when all is done."""

    class Stumbles(kind):
        calls = failures = 0

        def extend(self, segments, taps=()):
            found = super().extend(segments, taps)
            self.calls += len(segments) > 1
            if len(segments) > 1 and self.calls % 3 == 0:
                self.failures += 1
                raise RuntimeError("out of luck")
            return found

    return Stumbles


@pytest.mark.parametrize(("kind", "name"), [(LanguageModel, "llama"), (RecurrentModel, "mamba2")])
def test_steps_that_fail_and_are_taken_back_leave_the_law_as_it_is(kind, name):
    target = stumbling(kind)(tiny(name), max_slots=SLOTS)
    assert_lossless(walk(engine(target, drafter(), "block"), most=4))
    assert target.failures > 3


# transformers' own generate.


PIPELINE = LogitsProcessorList(
    [RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(0.7), TopKLogitsWarper(2)]
)


def processed(model: PreTrainedModel, prompt: Sequence[int]) -> Row:
    def row(output: tuple[int, ...]) -> Float[np.ndarray, " vocab"]:
        text = torch.tensor([[*prompt, *output]])
        with torch.no_grad():
            return PIPELINE(text, model(text, use_cache=False).logits[:, -1])[0].softmax(-1).numpy()

    return row


@pytest.mark.parametrize("target", ["llama", "mamba2"])
def test_through_custom_generate_every_row_has_the_law_of_the_processors(target):
    model, prompt, most = tiny(target, 3), [1, 0, 2, 1], 3
    drafted = as_custom_generate(drafter=drafter("llama", 3), verifier="block", length="fixed:2", max_slots=SLOTS)
    waiting: list[dict] = [{}]
    outputs: dict[tuple[int, ...], float] = {}
    while waiting:
        worlds = [World(script=script) for script in waiting[-SLOTS:]]
        del waiting[-SLOTS:]

        def dice(states, worlds=worlds) -> Dice:
            return EnumeratingDice([worlds[int(s.request.id)] for s in states], [s.num_steps for s in states])

        with borrowed(model, drafted.options) as used:
            used.dice = dice
        rows = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=True,
            repetition_penalty=1.3,
            temperature=0.7,
            top_k=2,
            max_new_tokens=most,
            num_return_sequences=len(worlds),
            custom_generate=drafted,
        )
        for world, said in zip(worlds, rows[:, len(prompt) :].tolist(), strict=True):
            outputs[tuple(said)] = outputs.get(tuple(said), 0.0) + world.probability
            waiting += world.others
    row = processed(model, prompt)
    for output, mass in outputs.items():
        expected = np.prod([row(output[:i])[token] for i, token in enumerate(output)])
        assert mass == pytest.approx(expected, abs=BOUND), output
    assert sum(outputs.values()) == pytest.approx(1, abs=BOUND)
    assert len(outputs) > 4
