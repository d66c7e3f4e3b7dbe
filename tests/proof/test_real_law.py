"""The law of engines over real transformers models: every run, from its prompt to its end, against plain forwards."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from outrider import as_custom_generate, catalog
from outrider.decoding.pearl import PearlDecoding
from outrider.decoding.protocol import Parts
from outrider.decoding.step import StepDecoding
from outrider.dice import Dice
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.engine.engine import Engine
from outrider.integrate.kept import borrowed
from outrider.lengths.adaedl import AdaedlLength
from outrider.lengths.fixed import FixedLength
from outrider.lm.model import LanguageModel
from outrider.lm.open import as_lm
from outrider.lm.packed import packable
from outrider.lm.recurrent import RecurrentModel
from outrider.lm.translated import Translated
from outrider.lm.vocabulary import Translation
from outrider.proof.enumerate import EnumeratingDice, World
from outrider.proof.runs import Row, Runs, law_of_runs, plain_rows
from outrider.trees.chain import ChainTree
from outrider.trees.protocol import UnprunedTree
from outrider.types import Draft, Request, Sampling, Verdict
from outrider.verifiers.protocol import chains
from tests.world.automaton import After
from tests.world.recurrent_zoo import RECURRENT, recurrent_config
from tests.world.zoo import attention_of, scrambled, tiny_config

pytestmark = pytest.mark.usefixtures("float64_stays_float64")

BOUND = 1e-12
SLOTS = 48
PROMPT = (1, 0, 1, 1, 0)


def tiny(name: str, vocab: int = 2, seed: int = 0) -> PreTrainedModel:
    """A tiny model of an architecture over very few tokens, in float64; none of them is sure to come."""
    recurrent = name in RECURRENT
    config = recurrent_config(name) if recurrent else tiny_config(name)
    attention = {} if recurrent else {"attn_implementation": attention_of(name)}
    config.vocab_size = vocab
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager", **attention).double().eval()
    scrambled(model, seed).get_output_embeddings().weight.data.mul_(0.4)
    return model


def drafter(name: str = "llama", vocab: int = 2) -> ModelDrafter:
    return ModelDrafter(lm=as_lm(tiny(name, vocab, seed=50), max_slots=SLOTS))


def engine(
    target: object, guesser: object, verifier: object = "block", tree: str = "chain", **others: object
) -> Engine:
    """An engine that drafts two tokens; the target is a model, or as the engine sees it."""
    parts = Parts(
        target=as_lm(target, max_slots=SLOTS) if isinstance(target, PreTrainedModel) else target,
        drafter=guesser,
        tree=catalog.make("tree", tree) if isinstance(tree, str) else tree,
        verifier=catalog.make("verifier", verifier) if isinstance(verifier, str) else verifier,
        length=FixedLength(num_speculative_tokens=2),
        decoding=StepDecoding(),
    )
    return Engine(replace(parts, **others), max_slots=SLOTS)


def walk(made: Engine, prompt: Sequence[int] = PROMPT, most: int = 4, rows: Row | None = None, **asked: object) -> Runs:
    """All runs of one request."""
    request = Request(id="", prompt=tuple(prompt), max_new_tokens=most, sampling=Sampling(), **asked)
    found = law_of_runs(made, [request], [rows or plain_rows(made.parts.target.model, prompt)])
    made.rest()
    print(found.num_runs, "runs,", found.drafted, "drafted,", found.accepted, "accepted, error", found.error)
    assert sum(found.outputs.values()) == pytest.approx(1, abs=BOUND)
    return found


def assert_lossless(found: Runs) -> None:
    """The law is kept by runs in which some draft tokens are accepted and some are not."""
    assert found.error < BOUND, found
    assert 0.1 < found.accepted < found.drafted - 0.1, found


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
def test_prompts_that_are_digested_in_pieces_beside_requests_that_decode_keep_the_law(target):
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
    if not packable(model):
        pytest.skip("this CPU has no kernels for bfloat16")
    both = [
        walk(
            engine(
                as_lm(model, max_slots=SLOTS, prepack=prepack),
                ModelDrafter(lm=as_lm(draft, max_slots=SLOTS, prepack=prepack)),
            )
        )
        for prepack in (False, True)
    ]
    assert both[0] == both[1]
    assert both[1].error < 0.02


# Two at once.


def pair(made: Engine, prompts: Sequence[Sequence[int]], most: int) -> Runs:
    requests = [Request(id="", prompt=tuple(p), max_new_tokens=most, sampling=Sampling()) for p in prompts]
    found = law_of_runs(made, requests, [plain_rows(made.parts.target.model, p) for p in prompts])
    print(found.num_runs, "runs, error", found.error)
    return found


@pytest.mark.parametrize("target", ["llama", "qwen3_next"])
def test_two_requests_in_one_batch_have_the_product_of_their_laws(target):
    made = engine(tiny(target), drafter(), "token", length=FixedLength(num_speculative_tokens=1))
    assert_lossless(pair(made, [PROMPT, (0, 1)], most=3 if target == "llama" else 2))


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


# What is wrong. A checker that passes one of these is broken.


@dataclass(frozen=True, kw_only=True)
class AcceptsEverything:
    """Takes the whole chain, and what the target draws behind it."""

    def verify(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Verdict:
        side = chains(draft, target_rows)
        last = torch.from_numpy(side.roots + side.lengths)
        return side.verdict(side.lengths, target_rows[last].argmax(-1))


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
    a, b, c = ((0, "accept", slot) for slot in range(3))
    world = World(script={a: 1, b: 0})
    assert [world.choose((1, "draft", 0), [(5, 1.0)]), world.choose(a, [(0, 0.25), (1, 0.75)])] == [5, 1]
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
