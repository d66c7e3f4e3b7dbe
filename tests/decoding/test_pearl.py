"""PEARL: the law by enumeration, the text of plain decoding, one text on both clocks, and where outputs end."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import outrider
from outrider.core.types import Ahead, Request, Running, Sampling, Step
from outrider.decoding.pearl import PearlDecoding
from outrider.decoding.protocol import Parts
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine.engine import Engine
from outrider.lm.tabular import TabularLM, random_rows
from outrider.proof.enumerate import law
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.token import TokenVerifier
from tests.decoding.pearl_engines import CLOCKS, DRAWN, GREEDY, PROMPT, SIMULATED, pearl
from tests.world.models import CONTEXT, DRAFTERS, engine, free_slots, raw_logits
from tests.world.tables import tables
from tests.world.verifiers import CARRYING, each, judges_of
from tests.world.zoo import VOCAB

exactly = pytest.mark.usefixtures("float64_stays_float64")
BOUND = 1e-12
FOR_CHAINS = each(name for name in judges_of("sampled chain") if name not in CARRYING)


# The law.


@pytest.mark.parametrize("verifier", FOR_CHAINS)
def test_three_steps_at_vocabulary_two_keep_the_law_with_every_verifier(verifier):
    assert law(tables(2, verifier, 2, decoding=SIMULATED), [0], 3).error < BOUND


@pytest.mark.parametrize("verifier", [TokenVerifier(), BlockVerifier()], ids=["token", "block"])
def test_three_steps_at_vocabulary_three_keep_the_law_and_end_in_a_post_verify_of_a_whole_draft(verifier):
    found = law(tables(3, verifier, 2, decoding=SIMULATED), [0], 3)
    assert found.error < BOUND
    assert max(map(len, found.emitted)) == 1 + 1 + 2


@pytest.mark.parametrize("verifier", [TokenVerifier(), BlockVerifier()], ids=["token", "block"])
def test_drafts_of_three_keep_the_law_over_four_steps(verifier):
    assert law(tables(2, verifier, 3, seed=5, decoding=SIMULATED), [1], 4, horizon=3).error < BOUND


@pytest.mark.parametrize(
    "drafter", [NgramDrafter(prompt_lookup_min=1), SuffixDrafter(min_match=1)], ids=["ngram", "suffix"]
)
def test_chosen_drafts_keep_the_law(drafter):
    parts = tables(3, TokenVerifier(), 3, seed=9, drafter=drafter, decoding=SIMULATED)
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
    assert law(tables(2, TokenVerifier(), 2, decoding=JudgesTheFirstTokenTwice()), [0], 3).error > 1e-3


def test_equal_rows_emit_one_token_then_the_rest_then_whole_drafts_without_a_bonus():
    same = random_rows(3, seed=2)
    parts = tables(3, TokenVerifier(), 4, drafter=ModelDrafter(lm=TabularLM(same, 3)), decoding=SIMULATED)
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


# EmbeddingAndHead.


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
