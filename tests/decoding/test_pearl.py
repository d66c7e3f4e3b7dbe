"""PEARL: the law by enumeration, greedy identity, one text on both clocks, what is counted, what is given back."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch

import outrider
from outrider import InputError, catalog
from outrider.decoding.pearl import LONGEST, PearlDecoding, balanced_length
from outrider.decoding.protocol import Parts
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine.engine import Engine
from outrider.lengths.fixed import FixedLength
from outrider.lm.tabular import TabularLM, random_rows
from outrider.proof.enumerate import law
from outrider.refusals import CARRYING, LOSSLESS, Cell, refusal
from outrider.trees.chain import ChainTree
from outrider.types import Ahead, Request, Running, Sampling, Step
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.match import MatchVerifier
from outrider.verifiers.token import TokenVerifier
from tests.world.automaton import After
from tests.world.models import CONTEXT, DRAFTERS, engine, raw_logits
from tests.world.zoo import VOCAB

exactly = pytest.mark.usefixtures("float64_stays_float64")

BOUND = 1e-12
CLOCKS = ("real", "simulated")
GREEDY = Sampling(temperature=0.0, seed=0)
DRAWN = Sampling(temperature=1.0, seed=0)
PROMPT = [3, 9, 4, 30, 9, 4]
FOR_CHAINS = [
    pytest.param(catalog.rows("verifier")[name].make(), id=name)
    for name, kinds in LOSSLESS.items()
    if "sampled chain" in kinds and name not in CARRYING
]


def tables(vocab: int, gamma: int, verifier: object, seed: int = 0, **others: object) -> Parts:
    """Random prefix-dependent tables for target and draft model, on the simulated clock."""
    return Parts(
        target=TabularLM(random_rows(vocab, seed), vocab),
        drafter=others.get("drafter") or ModelDrafter(lm=TabularLM(random_rows(vocab, seed + 100), vocab)),
        tree=ChainTree(),
        verifier=verifier,
        length=FixedLength(num_speculative_tokens=gamma),
        decoding=others.get("decoding") or PearlDecoding(clock="simulated"),
    )


def pearl(drafter: str = "model", verifier: str = "token", clock: str = "real", **others: object) -> Engine:
    """An engine over the tiny pair that drafts and verifies at once."""
    plain = engine(drafter, verifier, **others)
    parts = replace(plain.parts, decoding=PearlDecoding(clock=clock))
    return Engine(parts, max_slots=plain.max_slots, eos_ids=plain.eos_ids)


def free_slots(used: Engine) -> list[int]:
    used.rest()
    counts = []
    for lm in (used.parts.target, used.parts.drafter.lm):
        slots = [lm.open() for _ in range(lm.max_slots)]
        counts.append(len(slots))
        for slot in slots:
            lm.release(slot)
    return counts


# The law.


@pytest.mark.parametrize("verifier", FOR_CHAINS)
def test_three_steps_at_vocabulary_two_keep_the_law_with_every_verifier(verifier):
    assert law(tables(2, 2, verifier), [0], 3).error < BOUND


@pytest.mark.parametrize("verifier", [TokenVerifier(), BlockVerifier()], ids=["token", "block"])
def test_three_steps_at_vocabulary_three_keep_the_law_and_end_in_a_post_verify_of_a_whole_draft(verifier):
    found = law(tables(3, 2, verifier), [0], 3)
    assert found.error < BOUND
    assert max(map(len, found.emitted)) == 1 + 1 + 2


@pytest.mark.parametrize("verifier", [TokenVerifier(), BlockVerifier()], ids=["token", "block"])
def test_drafts_of_three_keep_the_law_over_four_steps(verifier):
    assert law(tables(2, 3, verifier, seed=5), [1], 4, horizon=3).error < BOUND


@pytest.mark.parametrize(
    "drafter", [NgramDrafter(prompt_lookup_min=1), SuffixDrafter(min_match=1)], ids=["ngram", "suffix"]
)
def test_chosen_drafts_keep_the_law(drafter):
    parts = tables(3, 3, TokenVerifier(), seed=9, drafter=drafter)
    found = law(parts, [0, 1, 2, 0, 1, 2, 0, 1], 3, horizon=4)
    assert found.error < BOUND
    assert found.accepted > 0


@dataclass(frozen=True, kw_only=True)
class JudgesTheFirstTokenTwice:
    """Lets the accepted first token lie ahead with the others, so that a post-verify judges it again by new draws."""

    drafts_ahead = True

    def step(self, parts: Parts, states: Sequence[Running], **options) -> list[Step]:
        fresh = [not state.ahead.tokens for state in states]
        steps = PearlDecoding(clock="simulated").step(parts, states, **options)
        for i, state in enumerate(states):
            if fresh[i] and state.ahead.tokens:
                first = state.tokens.pop()
                row = parts.drafter.lm._row(tuple(state.tokens))
                rows = torch.cat([torch.from_numpy(row)[None], state.ahead.rows])
                state.ahead = Ahead(tokens=(first, *state.ahead.tokens), rows=rows)
        return steps


def test_judging_the_first_token_twice_is_caught():
    assert law(tables(2, 2, TokenVerifier(), decoding=JudgesTheFirstTokenTwice()), [0], 3).error > 1e-3


def test_equal_rows_emit_one_token_then_the_rest_then_whole_drafts_without_a_bonus():
    same = random_rows(3, seed=2)
    parts = tables(3, 4, TokenVerifier(), drafter=ModelDrafter(lm=TabularLM(same, 3)))
    parts = replace(parts, target=TabularLM(same, 3))
    [output] = Engine(parts).generate([[0]], max_new_tokens=30, sampling=DRAWN)
    assert [len(step.tokens) for step in output.steps] == [1, 3, 4, 4, 4, 4, 4, 4, 2]
    assert all(step.num_accepted_tokens == len(step.tokens) for step in output.steps)
    assert output.num_draft_tokens == output.num_accepted_tokens == 30


# The text.


@exactly
@pytest.mark.parametrize("verifier", ["token", "block", "match"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_output_of_a_ragged_batch_is_that_of_plain_decoding(drafter, verifier):
    random = np.random.default_rng(0)
    prompts = [random.integers(3, VOCAB, size=n).tolist() for n in (9, 1, 14)]
    settings = [GREEDY, replace(GREEDY, repetition_penalty=1.3), replace(GREEDY, frequency_penalty=0.5)]
    both = [
        made.generate(prompts, max_new_tokens=16, sampling=settings)
        for made in (engine("none", max_slots=2), pearl(drafter, verifier, max_slots=2))
    ]
    assert [output.tokens for output in both[1]] == [output.tokens for output in both[0]]
    assert (sum(output.num_accepted_tokens for output in both[1]) > 0) == (drafter != "none")


@exactly
def test_both_clocks_give_the_same_text_for_twenty_seeds_in_ragged_batches():
    real, simulated = (pearl("model", "block", clock, max_slots=3) for clock in CLOCKS)
    for seed in range(20):
        random = np.random.default_rng(seed)
        prompts = [random.integers(3, VOCAB, size=n).tolist() for n in random.integers(1, 12, size=3)]
        settings = [
            Sampling(temperature=1.0, seed=seed),
            Sampling(temperature=1.2, top_p=0.9, repetition_penalty=1.2, seed=seed + 2),
            Sampling(temperature=0.0, seed=seed + 3),
        ]
        asked = {"max_new_tokens": 6, "sampling": settings}
        ours, theirs = (used.generate(prompts, **asked) for used in (real, simulated))
        assert [o.tokens for o in ours] == [o.tokens for o in theirs], seed
        counts = [
            [(s.num_draft_tokens, s.num_accepted_tokens) for o in outputs for s in o.steps]
            for outputs in (ours, theirs)
        ]
        assert counts[0] == counts[1], seed


@exactly
@pytest.mark.parametrize("verifier", ["token", "block"])
def test_requests_get_what_they_get_alone_and_may_be_cancelled(verifier):
    random = np.random.default_rng(4)
    these = [
        Request(
            id=str(i),
            prompt=tuple(random.integers(3, VOCAB, size=size).tolist()),
            max_new_tokens=most,
            sampling=replace(DRAWN, seed=50 + i),
            eos_ids=frozenset({7, 11}) if i % 2 else frozenset(),
        )
        for i, (size, most) in enumerate(zip((1, 9, 2, 25, 5, 3), (12, 20, 1, 9, 2, 16), strict=True))
    ]
    alone = {}
    for request in these:
        single = pearl("model", verifier)
        single.add(request)
        while single.busy:
            alone |= {u.id: u.output.tokens for u in single.step() if u.output is not None}
    busy, found, waiting, begun = pearl("model", verifier, max_slots=3), {}, list(these), 0
    while busy.busy or waiting:
        if waiting:
            busy.add(waiting.pop(0))
        updates = busy.step()
        found |= {u.id: u.output.tokens for u in updates if u.output is not None}
        begun += any(u.id == "1" for u in updates)
        if begun == 3 and (output := busy.cancel("1")) is not None:
            assert output.tokens == alone["1"][: len(output.tokens)]
            assert 3 <= len(output.tokens) < len(alone["1"])
    alone.pop("1")
    assert found == alone
    assert free_slots(busy) == [3, 3]


@exactly
def test_logprobs_are_those_of_a_teacher_forced_run():
    asked = {"max_new_tokens": 14, "sampling": [DRAWN, replace(GREEDY, repetition_penalty=1.5)], "logprobs": 0}
    outputs = pearl("model", "block").generate([PROMPT, [8]], **asked)
    for prompt, output in zip([PROMPT, [8]], outputs, strict=True):
        rows = raw_logits([*prompt, *output.tokens]).log_softmax(-1)[len(prompt) - 1 : -1]
        expected = rows.gather(1, torch.tensor(output.tokens)[:, None]).squeeze(1)
        assert output.logprobs == pytest.approx(expected.tolist(), abs=1e-5)


# Ends.


@exactly
@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_an_end_token_ends_the_output_wherever_it_falls(drafter):
    text = engine("none").generate([PROMPT], max_new_tokens=14, sampling=GREEDY)[0].tokens
    used = pearl(drafter, gamma=4)
    for end in dict.fromkeys(text):
        used.eos_ids = frozenset({end})
        [output] = used.generate([PROMPT], max_new_tokens=14, sampling=GREEDY)
        assert (output.tokens, output.finish_reason) == (text[: text.index(end) + 1], "stop")


@exactly
def test_exactly_max_new_tokens_come():
    text = engine("none").generate([PROMPT], max_new_tokens=8, sampling=GREEDY)[0].tokens
    used = pearl(gamma=3)
    for most in range(1, 9):
        [output] = used.generate([PROMPT], max_new_tokens=most, sampling=GREEDY)
        assert (output.tokens, output.finish_reason) == (text[:most], "length")


@exactly
@pytest.mark.parametrize("draft_context", [None, 240, 20])
def test_the_output_ends_with_the_context_though_the_draft_models_may_be_shorter(draft_context):
    prompt = np.random.default_rng(2).integers(3, VOCAB, size=CONTEXT - 30).tolist()
    [expected] = engine("none").generate([prompt], max_new_tokens=100, sampling=GREEDY)
    [output] = pearl(draft_context=draft_context).generate([prompt], max_new_tokens=100, sampling=GREEDY)
    assert (output.tokens, output.finish_reason) == (expected.tokens, "length")
    assert (output.num_draft_tokens > 0) == (draft_context != 20)


def test_a_stop_string_ends_the_text_where_plain_decoding_ends_it():
    asked = {"max_new_tokens": 60, "sampling": GREEDY, "stop": ["girl", " pla", "mom."]}
    drafted = outrider.load(decoding="pearl:4", dtype="float32")
    [plain], [ours] = (used.generate(["Once upon a time"], **asked) for used in (drafted.plain(), drafted))
    assert (ours.text, ours.tokens, ours.finish_reason) == (plain.text, plain.tokens, "stop")


@exactly
def test_a_prompt_that_continues_the_last_text_is_as_in_a_cold_engine():
    warm, cold = pearl(), pearl()
    for most in (5, 6, 7):
        [first] = warm.generate([PROMPT], max_new_tokens=most, sampling=DRAWN)
        prompt = [*PROMPT, *first.tokens, 7, 8]
        [again] = warm.generate([prompt], max_new_tokens=12, sampling=DRAWN)
        cold.rest()
        assert again.tokens == cold.generate([prompt], max_new_tokens=12, sampling=DRAWN)[0].tokens
    assert free_slots(warm) == [8, 8]


# What is counted.


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_steps_add_up_to_the_output(verifier):
    outputs = pearl("model", verifier, gamma=4).generate([PROMPT, [5], [8, 8]], max_new_tokens=33, sampling=DRAWN)
    whole = 0
    for output in outputs:
        steps = output.steps
        assert [token for step in steps for token in step.tokens] == output.tokens
        assert [len(step.tokens) for step in steps[:1]] == [1]
        for step in steps:
            assert step.num_accepted_tokens <= step.num_draft_tokens
            assert len(step.tokens) in (step.num_accepted_tokens, step.num_accepted_tokens + 1), step
        for before, step in pairwise(steps):
            if len(before.tokens) == before.num_accepted_tokens + 1:
                assert len(step.tokens) == 1, "a pre-verify follows a rejection"
            whole += len(step.tokens) == step.num_accepted_tokens > 1
    assert whole > 0


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("gamma", [2, 4])
def test_a_step_is_one_target_forward_and_one_draft_forward_per_token(gamma, clock):
    counted = pearl("model", gamma=gamma, clock=clock)
    target, draft = counted.parts.target, counted.parts.drafter.lm
    for i in range(3):
        counted.add([5 + i] * (2 + i), max_new_tokens=60, sampling=DRAWN, id=str(i))
    counted.step()
    for _ in range(8):
        before = target.num_forwards, draft.num_forwards
        counted.step()
        assert (target.num_forwards - before[0], draft.num_forwards - before[1]) == (1, gamma)


def test_the_target_reads_no_token_twice_and_none_after_the_last_one_ahead():
    same = random_rows(3, seed=2)
    parts = replace(
        tables(3, 4, TokenVerifier(), drafter=ModelDrafter(lm=TabularLM(same, 3))), target=TabularLM(same, 3)
    )
    read, extend = [], parts.target.extend

    def counting(segments, taps=()):
        read.append(sum(len(segment.tokens) for segment in segments))
        return extend(segments, taps)

    parts.target.extend = counting
    [output] = Engine(parts).generate([[0]], max_new_tokens=12, sampling=DRAWN)
    assert read == [len(step.tokens) for step in output.steps] == [1, 3, 4, 4]


class TickingLM(TabularLM):
    """Tables whose every forward takes some ticks of a clock."""

    def __init__(self, seed: int, ticks: float, clock: list[float]) -> None:
        super().__init__(random_rows(3, seed), 3)
        self._ticks, self._clock = ticks, clock

    def extend(self, segments, taps=()):
        self._clock[0] += self._ticks
        return super().extend(segments, taps)


@pytest.mark.parametrize(("target", "draft", "gamma"), [(9.0, 2.0, 4), (5.0, 2.0, 4), (8.0, 2.0, 4), (1.0, 3.0, 2)])
def test_a_simulated_step_takes_the_longer_of_drafting_and_verifying_not_their_sum(target, draft, gamma):
    clock = [0.0]
    parts = tables(3, gamma, TokenVerifier(), drafter=ModelDrafter(lm=TickingLM(1, draft, clock)))
    decoding = PearlDecoding(clock="simulated", _now=lambda: clock[0])
    parts = replace(parts, target=TickingLM(2, target, clock), decoding=decoding)
    [output] = Engine(parts).generate([[0, 1]], max_new_tokens=40, sampling=DRAWN)
    whole = [step.timing for step in output.steps if step.timing.drafter == draft * gamma]
    assert len(whole) > len(output.steps) // 2
    for timing in whole:
        assert (timing.target, timing.overlap) == (target, min(target, draft * gamma))
        assert timing.total == max(target, draft * gamma)


def test_an_overlapped_step_takes_no_less_than_either_side_and_no_more_than_both():
    [output] = pearl("model").generate([PROMPT], max_new_tokens=40, sampling=DRAWN)
    for timing in (step.timing for step in output.steps):
        sides = timing.drafter, timing.target + timing.rows
        others = timing.verify + timing.commit + timing.rest
        assert max(sides) - 1e-9 <= timing.total - others + timing.rest
        assert 0 <= timing.overlap <= min(sides) + 1e-9
        assert all(part >= 0 for part in vars(timing).values())


# What goes wrong.


class Broken(Exception):
    """What a model raises in these tests."""


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("sides", [("target",), ("draft",), ("target", "draft")])
def test_an_error_on_either_side_surfaces_and_leaves_nothing_running_or_taken(sides, clock):
    used = pearl("model", clock=clock)
    fine = used.generate([PROMPT, [5]], max_new_tokens=20, sampling=DRAWN)
    lms = {"target": used.parts.target, "draft": used.parts.drafter.lm}
    kept = {side: lms[side].extend for side in sides}
    for side in sides:
        calls = iter(range(100))

        def failing(segments, taps=(), side=side, calls=calls):
            if next(calls) >= (6 if side == "target" else 18):
                raise Broken(side)
            return kept[side](segments, taps)

        lms[side].extend = failing
    with pytest.raises(Broken) as raised:
        used.generate([PROMPT, [5]], max_new_tokens=20, sampling=DRAWN)
    assert str(raised.value) in sides
    assert not used.busy
    for side in sides:
        lms[side].extend = kept[side]
    assert free_slots(used) == [8, 8]
    again = used.generate([PROMPT, [5]], max_new_tokens=20, sampling=DRAWN)
    assert [output.tokens for output in again] == [output.tokens for output in fine]


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("side", ["target", "draft"])
def test_an_error_that_passes_changes_no_output(side, clock):
    used = pearl("model", clock=clock)
    fine = used.generate([PROMPT, [5]], max_new_tokens=20, sampling=DRAWN)
    lm = used.parts.target if side == "target" else used.parts.drafter.lm
    kept, calls = lm.extend, iter(range(1000))

    def failing(segments, taps=()):
        if next(calls) == (6 if side == "target" else 18):
            raise Broken(side)
        return kept(segments, taps)

    lm.extend = failing
    again = used.generate([PROMPT, [5]], max_new_tokens=20, sampling=DRAWN)
    assert next(calls) > 18
    assert [output.tokens for output in again] == [output.tokens for output in fine]


# How it is put together.


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tree": "gumbel:branching=2x2"}, "a tree has no one end to go on from; use tree 'chain', or decoding 'step'"),
        ({"length": "adaedl"}, "not as length 'adaedl' says; use length 'fixed', or decoding 'step'"),
        ({"length": "tetris"}, "not as length 'tetris' says; use length 'fixed'"),
        (
            {"verifier": "greedy_block"},
            "'greedy_block' carries rows from step to step, past them; use verifier 'block'",
        ),
        ({"decoding": "pearl:1"}, "num_speculative_tokens must be >= 2, got 1"),
        ({"decoding": "pearl:4", "length": "fixed:4"}, "give one of them"),
        ({"decoding": "perl"}, "unknown decoding 'perl'; did you mean 'pearl'?"),
        ({"decoding": "pearl:clock=wall"}, "unknown decoding 'pearl' field 'clock' 'wall'"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(options, sentence):
    with pytest.raises(InputError) as refused:
        outrider.load(**{"decoding": "pearl"} | options)
    assert sentence in str(refused.value)


def test_a_drafter_that_reads_the_target_is_refused():
    reason = refusal(Cell(rows="sampled", structure="chain", verifier="token", decoding="pearl", taps=True))
    assert "hidden states" in reason
    assert refusal(Cell(rows="sampled", structure="chain", verifier="token", taps=True)) is None


def test_the_length_is_what_was_named_or_what_the_clock_says():
    assert outrider.load(decoding="pearl:3").parts.length == FixedLength(num_speculative_tokens=3)
    assert outrider.load(decoding="pearl", length="fixed:7").parts.length == FixedLength(num_speculative_tokens=7)
    measured = outrider.load(decoding=PearlDecoding()).parts.length
    assert 2 <= measured.num_speculative_tokens <= LONGEST


@pytest.mark.parametrize(
    ("target", "draft", "length"), [(9.0, 2.0, 5), (8.0, 2.0, 4), (1.0, 2.0, 2), (99.0, 1.0, LONGEST)]
)
def test_the_measured_length_is_how_often_the_drafter_fits_into_a_target_forward(target, draft, length):
    clock = [0.0]
    parts = tables(3, 4, TokenVerifier(), drafter=ModelDrafter(lm=TickingLM(1, draft, clock)))
    parts = replace(parts, target=TickingLM(2, target, clock))
    assert balanced_length(parts, now=lambda: clock[0]) == length


# Constraints.

TRIGGER = After(vocab=3, followers={2: frozenset({0, 1}), 0: frozenset({1, 2})})
"""Begins and ends inside drafts, and inside what lies ahead."""


@pytest.mark.parametrize(
    ("verifier", "drafter"),
    [
        (TokenVerifier(), None),
        (BlockVerifier(), None),
        (MatchVerifier(), None),
        (MatchVerifier(), NgramDrafter(prompt_lookup_min=1)),
    ],
    ids=["token", "block", "match", "ngram"],
)
def test_a_constraint_keeps_the_law_of_constrained_plain_decoding(verifier, drafter):
    prompt = [0, 1, 2, 0, 1, 2, 2, 0, 0, 1]
    row = random_rows(3, 0)

    def plainly(output: tuple[int, ...]) -> np.ndarray:
        kept = np.where(TRIGGER.allowed(output), row((*prompt, *output)), 0.0)
        return kept / kept.sum()

    found = law(tables(3, 2, verifier, drafter=drafter), prompt, 3, target_law=plainly, constraint=TRIGGER)
    assert found.error < BOUND
    assert found.accepted > 0
    assert all(TRIGGER.fits(output) for output in found.emitted)


@exactly
def test_constrained_outputs_are_those_of_plain_decoding_and_the_same_on_both_clocks():
    rule = After(vocab=VOCAB, followers={t: frozenset({(t + 1) % 8 + 3, t % 8 + 3}) for t in range(3, 11)})
    asked = {"max_new_tokens": 30, "constraint": [rule, None, rule], "sampling": [GREEDY, DRAWN, DRAWN]}
    prompts = [PROMPT, [5], [4, 7]]
    real, simulated = (pearl("model", "block", clock).generate(prompts, **asked) for clock in CLOCKS)
    assert [out.tokens for out in real] == [out.tokens for out in simulated]
    assert all(rule.fits(real[i].tokens) for i in (0, 2))
    [plain] = engine("none").generate([PROMPT], max_new_tokens=30, constraint=rule, sampling=GREEDY)
    assert real[0].tokens == plain.tokens
    assert real[0].num_accepted_tokens > 0
    [alone] = pearl("model", "block").generate([[5]], max_new_tokens=30, sampling=DRAWN)
    assert real[1].tokens == alone.tokens


@exactly
@pytest.mark.parametrize("side", ["target", "draft"])
def test_a_failed_step_takes_its_constraint_back(side):
    rule = After(vocab=VOCAB, followers={t: frozenset({(t + 1) % 8 + 3, t % 8 + 3}) for t in range(3, 11)})
    used = pearl("model", "token")
    asked = {"max_new_tokens": 24, "constraint": rule, "sampling": DRAWN}
    fine = used.generate([PROMPT, [5]], **asked)
    lm = used.parts.target if side == "target" else used.parts.drafter.lm
    kept, calls = lm.commit, iter(range(1000))

    def failing(paths):
        if next(calls) == 9:
            raise Broken(side)
        return kept(paths)

    lm.commit = failing
    again = used.generate([PROMPT, [5]], **asked)
    assert next(calls) > 9
    assert [output.tokens for output in again] == [output.tokens for output in fine]
