"""Log-probabilities of prompts equal those of a plain forward, whatever else runs."""

import asyncio

import pytest
import torch

import outrider
from outrider.core.inputs import InputError
from outrider.core.types import Sampling
from outrider.engine.generation import Generation
from tests.serve.services import GREEDY, read, run, task
from tests.world.models import engine, free_slots, raw_logits

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 9, 11, 4, 8], [9, 8], [12], [3, 9, 4, 30, 9, 4] * 5]


def expected(prompt: list[int]) -> torch.Tensor:
    """Log-softmax of the target's logits in front of every token but the first."""
    return raw_logits(prompt).float().log_softmax(-1)[:-1]


def check(found, prompt: list[int], top: int) -> None:
    law = expected(prompt)
    assert found.token_logprobs[0] is None
    assert found.top[0] is None
    assert len(found.token_logprobs) == len(found.top) == len(prompt)
    for row, token, own, best in zip(law, prompt[1:], found.token_logprobs[1:], found.top[1:], strict=True):
        assert own == pytest.approx(row[token].item(), abs=1e-5)
        values, ids = row.topk(top) if top else ([], torch.tensor([]))
        assert list(best) == ids.tolist()
        assert list(best.values()) == pytest.approx(list(map(float, values)), abs=1e-5)
        if token in best:
            assert best[token] == own


@pytest.mark.parametrize("drafter", ["model", "none"])
@pytest.mark.parametrize("most", [512, 4])
def test_scores_equal_a_plain_forward_while_others_decode(drafter, most):
    busy = engine(drafter, max_slots=3)
    busy.max_prefill_tokens = most

    async def work(service):
        others = [
            asyncio.create_task(read(ticket)) for ticket in service.submit([task("x", most=40), task("y", most=40)])
        ]
        scores = await asyncio.gather(*(service.score(prompt, top) for prompt in PROMPTS for top in (0, 3)))
        return scores, await asyncio.gather(*others)

    scores, others = run(busy, work)
    for found, (prompt, top) in zip(scores, [(prompt, top) for prompt in PROMPTS for top in (0, 3)], strict=True):
        check(found, prompt, top)
    [alone] = engine(drafter).generate([[3, 9, 4]], max_new_tokens=40, sampling=GREEDY)
    assert [other.tokens for other in others] == [alone.tokens] * 2
    assert set(free_slots(busy)) == {3}


def test_a_prompt_is_scored_whole_though_its_beginning_is_in_a_cache():
    busy = engine("model")
    [first] = busy.generate([PROMPTS[3]], max_new_tokens=4, sampling=GREEDY)
    [again] = busy.generate([PROMPTS[3]], max_new_tokens=4, sampling=GREEDY, prompt_logprobs=2)
    assert again.tokens == first.tokens
    assert first.prompt_logprobs is None
    check(again.prompt_logprobs, PROMPTS[3], 2)
    [next_] = busy.generate([PROMPTS[3]], max_new_tokens=4, sampling=GREEDY)
    assert next_.reused_tokens == len(PROMPTS[3]) - 1


def test_scoring_alone_emits_nothing_and_leaves_its_prompt_for_others():
    busy = engine("none")
    [out] = busy.generate([PROMPTS[3]], max_new_tokens=0, prompt_logprobs=1)
    assert (out.tokens, out.text, out.finish_reason, out.num_steps) == ([], "", "length", 0)
    check(out.prompt_logprobs, PROMPTS[3], 1)
    assert busy.generate([PROMPTS[3]], max_new_tokens=2)[0].reused_tokens == len(PROMPTS[3]) - 1


def test_a_prompt_as_long_as_the_context_can_be_scored():
    busy = engine("none")
    prompt = [3 + i % 20 for i in range(256)]
    [out] = busy.generate([prompt], max_new_tokens=0, prompt_logprobs=0)
    assert len(out.prompt_logprobs.token_logprobs) == 256
    with pytest.raises(InputError, match="the prompt has 256 tokens"):
        busy.generate([prompt], max_new_tokens=1, prompt_logprobs=0)


def test_scores_survive_a_step_that_is_undone():
    busy, failures = engine("model"), []

    def watch(cycle):
        if len(failures) < 2 and len(cycle.states) > 1:
            failures.append(1)
            raise RuntimeError("a step fails once")

    busy.watch = watch
    prompts = [PROMPTS[0], PROMPTS[3]]
    found = busy.generate(prompts, max_new_tokens=8, sampling=GREEDY, prompt_logprobs=2)
    assert failures
    for out, prompt in zip(found, prompts, strict=True):
        check(out.prompt_logprobs, prompt, 2)
    assert [out.tokens for out in found] == [
        out.tokens for out in engine("model").generate(prompts, max_new_tokens=8, sampling=GREEDY)
    ]


def test_log_probabilities_of_an_output_are_the_same_with_and_without_drafts():
    busy = outrider.load(dtype="float32")
    options = Generation(max_new_tokens=30, sampling=Sampling(temperature=0), logprobs=3)
    [drafted] = busy.generate(["Once upon a time"], options=options)
    busy.rest()
    [plain] = busy.generate(["Once upon a time"], options=options, max_draft_tokens=0)
    assert plain.num_draft_tokens == 0 < drafted.num_draft_tokens
    assert drafted.tokens == plain.tokens
    assert drafted.logprobs == pytest.approx(plain.logprobs, abs=1e-5)
    # Reading the output as a prompt says the same.
    whole = [*busy.encode("Once upon a time"), *plain.tokens]
    [read_] = busy.generate([whole], max_new_tokens=0, prompt_logprobs=3)
    assert read_.prompt_logprobs.token_logprobs[-len(plain.tokens) :] == pytest.approx(plain.logprobs, abs=1e-4)


def test_a_service_refuses_scores_of_a_wrong_prompt():
    async def work(service):
        with pytest.raises(InputError, match="token id 999"):
            await service.score([3, 999], 1)
        return service.in_flight

    assert run(engine("none"), work) == 0
