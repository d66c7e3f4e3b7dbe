"""Requests through the engine: what each gets is what it gets alone, and what the numbers beside it say is so."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import MinLengthLogitsProcessor, NoBadWordsLogitsProcessor

from outrider.core import metrics
from outrider.core.types import Request, Sampling
from outrider.engine.engine import Engine
from outrider.engine.output import Output
from outrider.trees.chain import ChainTree
from outrider.trees.gumbel import GumbelTree
from outrider.verifiers.recursive import RecursiveVerifier
from tests.world.models import CONTEXT, DRAFTERS, VERIFIERS, engine, free_slots, llama, raw_logits, target
from tests.world.zoo import VOCAB

pytestmark = pytest.mark.usefixtures("float64_stays_float64")

GREEDY = Sampling(temperature=0, seed=0)
DRAWN = Sampling(temperature=1.0, seed=0)
PROMPT = [3, 9, 4, 30, 9, 4]


def requests(setting: Sampling) -> list[Request]:
    random = np.random.default_rng(0)
    return [
        Request(
            id=str(i),
            prompt=tuple(random.integers(3, VOCAB, size=size).tolist()),
            max_new_tokens=most,
            sampling=replace(setting, seed=50 + i),
            eos_ids=frozenset({7, 11}) if i % 2 else frozenset(),
        )
        for i, (size, most) in enumerate(zip((1, 9, 2, 25, 5, 3, 14, 7), (12, 20, 1, 9, 2, 16, 3, 11), strict=True))
    ]


def run(busy: Engine, these: Sequence[Request], *, late: int = 0, cancel: Sequence[str] = ()) -> dict[str, Output]:
    """All outputs; requests from number `late` on join one per step, and some are cancelled after three steps."""
    waiting, found, steps = list(these), {}, 0
    for _ in range(late or len(these)):
        busy.add(waiting.pop(0))
    while busy.busy or waiting:
        if waiting:
            busy.add(waiting.pop(0))
        if steps == 3:
            found.update({id: out for id in cancel if (out := busy.cancel(id)) is not None})
        found.update({update.id: update.output for update in busy.step() if update.output is not None})
        steps += 1
    return found


def tokens_of(outputs: dict[str, Output]) -> dict[str, list[int]]:
    return {id: output.tokens for id, output in sorted(outputs.items())}


@pytest.mark.parametrize("setting", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_requests_get_what_they_get_alone(drafter, verifier, setting):
    these = requests(setting)
    single = engine(drafter, verifier)
    alone = {}
    for request in these:
        single.rest()
        alone |= tokens_of(run(single, [request]))
    for slots, late in ((8, 0), (3, 0), (8, 2), (3, 1)):
        busy = engine(drafter, verifier, max_slots=slots)
        assert tokens_of(run(busy, these, late=late)) == alone, (slots, late)
        cancelled = run(busy, these, cancel=("0", "5", "7"))
        for id, output in cancelled.items():
            assert output.tokens == alone[id][: len(output.tokens)], (slots, id)
            if output.finish_reason != "cancelled":
                assert len(output.tokens) == len(alone[id]), (slots, id)
        free_slots(busy)


def test_two_hundred_requests_share_four_slots_and_give_them_back():
    small = engine("model", max_slots=4)
    prompts = np.random.default_rng(1).integers(3, VOCAB, size=(200, 4)).tolist()
    outputs = small.generate(prompts, max_new_tokens=2, sampling=DRAWN)
    assert [len(output.tokens) for output in outputs] == [2] * 200
    assert len({output.id for output in outputs}) == 200
    assert free_slots(small) == [4, 4]


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_an_end_token_inside_a_draft_ends_the_output(drafter, verifier):
    text = engine("none").generate([PROMPT], max_new_tokens=30, sampling=GREEDY)[0].tokens
    assert len(set(text)) > 5, text
    for ends in ({text[4]}, {text[9], text[6]}, {text[0]}, {text[7], VOCAB - 1, 1}):
        expected = text[: min(text.index(e) for e in ends if e in text) + 1]
        single = engine(drafter, verifier, gamma=5, eos_ids=frozenset(ends))
        [output] = single.generate([PROMPT], max_new_tokens=30, sampling=GREEDY)
        assert (output.tokens, output.finish_reason) == (expected, "stop")
        [all_] = single.generate([PROMPT], max_new_tokens=30, sampling=GREEDY, ignore_eos=True)
        assert (all_.tokens, all_.finish_reason) == (text, "length")


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("most", [1, 2, 3])
def test_exactly_max_new_tokens_come(drafter, most):
    text = engine("none").generate([PROMPT], max_new_tokens=3, sampling=GREEDY)[0].tokens
    [output] = engine(drafter, gamma=4).generate([PROMPT], max_new_tokens=most, sampling=GREEDY)
    assert (output.tokens, output.finish_reason) == (text[:most], "length")
    assert output.num_draft_tokens <= most * (most - 1) // 2


def test_several_requests_that_leave_no_room_to_draft_give_their_unused_draft_slots_back():
    outputs = engine("model").generate([[5], [6], [7]], max_new_tokens=1, sampling=GREEDY)
    assert [len(output.tokens) for output in outputs] == [1, 1, 1]


@pytest.mark.parametrize("draft_context", [None, 240, 20])
def test_the_output_ends_with_the_context_though_the_draft_models_may_be_shorter(draft_context):
    prompt = np.random.default_rng(2).integers(3, VOCAB, size=CONTEXT - 30).tolist()
    plain, drafted = engine("none"), engine("model", draft_context=draft_context)
    [expected] = plain.generate([prompt], max_new_tokens=100, sampling=GREEDY)
    [output] = drafted.generate([prompt], max_new_tokens=100, sampling=GREEDY)
    assert (len(expected.tokens), expected.finish_reason) == (30, "length")
    assert (output.tokens, output.finish_reason) == (expected.tokens, "length")
    assert (output.num_draft_tokens > 0) == (draft_context != 20)


def test_the_longest_prompt_gives_one_token():
    [output] = engine("model").generate([[5] * (CONTEXT - 1)], max_new_tokens=9, sampling=GREEDY)
    assert (len(output.tokens), output.finish_reason) == (1, "length")


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_steps_add_up_to_the_output(verifier):
    outputs = engine("model", verifier, gamma=4).generate([PROMPT, [5], [8, 8]], max_new_tokens=33, sampling=DRAWN)
    for output in outputs:
        steps = output.steps
        assert [token for step in steps for token in step.tokens] == output.tokens
        assert output.num_steps == len(steps)
        assert output.block_efficiency == pytest.approx(metrics.block_efficiency(steps))
        assert output.accepted_per_position == metrics.accepted_per_position(steps)
        assert sum(output.accepted_per_position) == output.num_accepted_tokens == metrics.num_accepted_tokens(steps)
        assert output.num_draft_tokens == metrics.num_draft_tokens(steps)
        for step in steps:
            assert len(step.tokens) == step.num_accepted_tokens + 1 <= step.num_draft_tokens + 1, step
        assert output.accepted_per_position == sorted(output.accepted_per_position, reverse=True)


@pytest.mark.parametrize("gamma", [1, 4])
def test_a_step_is_one_target_forward_and_one_draft_forward_per_token(gamma):
    counted = engine("model", gamma=gamma)
    target, draft = counted.parts.target, counted.parts.drafter.lm
    for i in range(3):
        counted.add([5 + i] * (2 + i), max_new_tokens=60, sampling=DRAWN, id=str(i))
    counted.step()
    for _ in range(6):
        before = target.num_forwards, draft.num_forwards
        counted.step()
        assert (target.num_forwards - before[0], draft.num_forwards - before[1]) == (1, gamma)


def test_logprobs_are_those_of_a_teacher_forced_run():
    asked = {"max_new_tokens": 14, "sampling": [DRAWN, replace(GREEDY, repetition_penalty=1.5)], "logprobs": 0}
    outputs = engine("model", "block").generate([PROMPT, [8]], **asked)
    for prompt, output in zip([PROMPT, [8]], outputs, strict=True):
        rows = raw_logits([*prompt, *output.tokens]).log_softmax(-1)[len(prompt) - 1 : -1]
        expected = rows.gather(1, torch.tensor(output.tokens)[:, None]).squeeze(1)
        assert output.logprobs == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_steps_bring_the_logits_of_their_tokens_if_asked(drafter):
    request = Request(id="r", prompt=tuple(PROMPT), max_new_tokens=9, sampling=GREEDY, keep_logits=True)
    busy, steps = engine(drafter), []
    busy.add(request)
    while busy.busy:
        busy.step(steps.append)
    tokens = [token for step in steps for token in step.tokens]
    expected = raw_logits([*PROMPT, *tokens])[len(PROMPT) - 1 : -1]
    torch.testing.assert_close(torch.cat([step.logits for step in steps]), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_request_ends_where_its_own_rule_says(drafter):
    whole = tokens_of(run(engine(drafter), [Request(id="r", prompt=(3, 9), max_new_tokens=20, sampling=GREEDY)]))["r"]
    asked: list[list[int]] = []

    def ends(output: Sequence[int]) -> bool:
        asked.append(list(output))
        return len(output) == 7

    request = Request(id="r", prompt=(3, 9), max_new_tokens=20, sampling=GREEDY, ends=ends)
    output = run(engine(drafter), [request])["r"]
    assert (output.tokens, output.finish_reason) == (whole[:7], "stop")
    assert asked == [whole[:n] for n in range(1, 8)], "once per token, in order, and not beyond the end"


def test_a_prompt_that_continues_the_last_text_prefills_only_what_is_new():
    warm, cold = engine("model"), engine("model")
    first = list(range(3, 50))
    [output] = warm.generate([first], max_new_tokens=12, sampling=DRAWN)
    second = [*first, *output.tokens, 6, 7, 8, 9]
    fed, extend = [], warm.parts.target.extend

    def counting(segments, taps=()):
        fed.append(sum(len(segment.tokens) for segment in segments))
        return extend(segments, taps)

    warm.parts.target.extend = counting
    [warm_output] = warm.generate([second], max_new_tokens=12, sampling=DRAWN)
    left, drafted = len(second) - (len(first) + len(output.tokens) - 1), 3
    assert fed[0] == left + drafted, fed
    assert warm_output.tokens == cold.generate([second], max_new_tokens=12, sampling=DRAWN)[0].tokens
    assert free_slots(warm) == [8, 8]


def forwards_by_step(busy: Engine, lengths: Sequence[int]) -> list[int]:
    """Target forwards of each engine step, for prompts of these lengths that come together."""
    for i, size in enumerate(lengths):
        busy.add([3 + (7 * i + k) % 50 for k in range(size)], max_new_tokens=4, sampling=replace(DRAWN, seed=i))
    counts = []
    while busy.busy:
        before = busy.parts.target.num_forwards
        busy.step()
        counts.append(busy.parts.target.num_forwards - before)
    return counts


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ((40,), [1, 1, 1, 1]),  # the prompt goes with the first step
        ((40, 33, 36), [1, 1, 1, 1]),  # prompts of like length too
        ((120, 40), [3, 1, 1, 1]),  # others have forwards of their own
        ((1, 40), [2, 1, 1, 1]),  # whoever decodes does not wait in the forward of a prompt
        ((200, 200, 200), [1, 1, 1, 1]),  # while nobody decodes, a step reads up to 2,048 tokens
    ],
)
def test_prompts_share_forwards_where_that_wastes_little(lengths, expected):
    assert forwards_by_step(engine("none"), lengths) == expected


def test_what_a_step_cannot_read_of_prompts_comes_one_step_later():
    busy = engine("none")
    busy.max_prefill_tokens = 512
    assert forwards_by_step(busy, (200, 200, 200)) == [3, 2, 1, 1, 1]


@pytest.mark.parametrize(
    ("drafter", "tree"),
    [*((name, ChainTree()) for name in DRAFTERS), ("model", GumbelTree(branching=(2, 2)))],
    ids=[*DRAFTERS, "tree"],
)
@pytest.mark.parametrize("setting", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_prompt_prefilled_by_its_first_step_gives_what_one_prefilled_before_gives(drafter, tree, setting):
    these = [replace(r, prompt=(*r.prompt, *range(3, 60), *range(3, 30))) for r in requests(setting)]

    def outputs(crops: bool) -> tuple[dict[str, list[int]], int]:
        busy = engine(drafter)
        busy.parts = replace(
            busy.parts, tree=tree, verifier=RecursiveVerifier() if tree != ChainTree() else busy.parts.verifier
        )
        busy.parts.target.crops = crops
        return tokens_of(run(busy, these, late=4)), busy.parts.target.num_forwards

    together, fewer = outputs(True)
    apart, more = outputs(False)
    assert together == apart
    assert fewer < more


@pytest.mark.parametrize("prompt", [[3, 4, 5, 6], [3, 4, 5], [3, 60, 5, 6, 7], [60, 3]])
def test_a_prompt_that_leaves_the_last_text_is_as_in_a_cold_engine(prompt):
    warm, cold = engine("model"), engine("model")
    warm.generate([[3, 4, 5, 6]], max_new_tokens=9, sampling=GREEDY)
    asked = {"max_new_tokens": 15, "sampling": DRAWN}
    assert warm.generate([prompt], **asked)[0].tokens == cold.generate([prompt], **asked)[0].tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_settings_of_a_batch_stay_with_their_request(drafter, temperature):
    base = Sampling(temperature=temperature, seed=9)
    settings = [
        base,
        replace(base, repetition_penalty=1.4),
        replace(base, frequency_penalty=0.8, presence_penalty=0.5),
        replace(base, logit_bias={5: 6.0, 6: 6.0, 7: -50.0}),
        replace(base, top_k=3),
        replace(base, processors=[NoBadWordsLogitsProcessor([[9], [4, 30]])]),
        replace(base, processors=[MinLengthLogitsProcessor(20, list(range(32, VOCAB)))]),
    ]
    prompts = [PROMPT] * len(settings)
    together = [o.tokens for o in engine(drafter, "block").generate(prompts, max_new_tokens=25, sampling=settings)]
    single = engine(drafter, "block")
    for setting, tokens in zip(settings, together, strict=True):
        assert tokens == single.generate([PROMPT], max_new_tokens=25, sampling=setting)[0].tokens
    assert len({tuple(tokens) for tokens in together}) > 3, together
    assert 9 not in together[5]
    assert max(together[6][: 20 - len(PROMPT)]) < 32, together[6]


@pytest.mark.parametrize("penalty", [1.0, 1.3, 2.0])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_output_is_what_transformers_generates(drafter, penalty):
    expected = llama().generate(
        torch.tensor([PROMPT]), do_sample=False, max_new_tokens=40, repetition_penalty=penalty, eos_token_id=2
    )[0, len(PROMPT) :]
    setting = replace(GREEDY, repetition_penalty=penalty)
    [output] = engine(drafter, eos_ids=frozenset({2})).generate([PROMPT], max_new_tokens=40, sampling=setting)
    assert output.tokens == expected.tolist()


def test_a_branching_draft_fits_where_only_its_depth_does():
    parts = replace(
        engine("model").parts,
        target=target(2, max_context=40),
        tree=GumbelTree(branching=(3, 2, 2)),
        verifier=RecursiveVerifier(),
    )
    branching = Engine(parts, max_slots=2)
    settings = [GREEDY, DRAWN]
    outputs = branching.generate([PROMPT] * 2, max_new_tokens=64, sampling=settings)
    assert [len(out.tokens) for out in outputs] == [40 - len(PROMPT)] * 2
    branching.rest()
    [plain] = branching.plain().generate([PROMPT], max_new_tokens=64, sampling=GREEDY)
    assert outputs[0].tokens == plain.tokens


def test_a_plain_engine_leaves_all_slots_to_the_one_that_it_was_made_from():
    drafting = engine("model", max_slots=2)
    drafting.plain().generate([PROMPT], max_new_tokens=4)
    assert len(drafting.generate([PROMPT, [5]], max_new_tokens=4)) == 2
