"""The numbers of a service add up to what its outputs say."""

from dataclasses import replace

import pytest

from outrider.core.inputs import InputError
from outrider.engine.engine import Engine
from outrider.serve.limits import Limits
from outrider.serve.observe.metrics import REASONS
from outrider.serve.run import worker
from outrider.serve.run.outputs import RequestSpeculation
from tests.serve.observe.test_exposition import HISTOGRAMS
from tests.serve.services import made, read, run, task, until
from tests.world.models import engine, target


def test_numbers_add_up_to_the_outputs():
    async def work(service):
        prompt = [5, 6, 7] * 12
        tasks = [task(str(i), [*prompt, 4 + i], most=10 + i) for i in range(12)]
        off = task("off", prompt, speculation=RequestSpeculation(enabled=False))
        found = await made(service, *tasks, off)
        left, other = service.submit([task("left", most=200), task("other", most=30)])
        await left.__anext__()
        left.cancel()
        found += [await read(other), await read(left)]
        # Events come before the numbers are complete.
        await until(lambda: not service.in_flight)
        await service.score([3, 4, 5], 0)
        return found, service.metrics, service.slots

    found, metrics, slots = run(engine("model", gamma=3, max_slots=4), work)
    value = metrics.value
    steps = [update.step for each in found for update in each.updates if update.step is not None]
    outputs = [each.output for each in found]
    ends = [value("vllm:request_success_total", finished_reason=reason) for reason in REASONS.values()]
    assert ends == [0, 15, 1, 0]
    assert value("vllm:generation_tokens_total") == sum(len(output.tokens) for output in outputs)
    assert value("outrider:cancelled_tokens_total") == len(outputs[-1].tokens)
    assert value("vllm:prompt_tokens_total") == sum(output.prompt_tokens for output in outputs) + 3
    assert value("vllm:prefix_cache_queries_total") == value("vllm:prompt_tokens_total")
    assert value("vllm:prompt_tokens_cached_total") == sum(output.reused_tokens for output in outputs) > 0
    assert value("vllm:prefix_cache_hits_total") == value("vllm:prompt_tokens_cached_total")
    # One update was read apart.
    num_steps = value("outrider:tokens_per_step_count")
    assert num_steps == len(steps) + 1
    lengths = [value("outrider:speculation_length_total", length=str(length)) for length in range(4)]
    assert sum(lengths) == num_steps
    assert value("vllm:spec_decode_num_drafts_total") == num_steps - lengths[0]
    assert value("vllm:spec_decode_num_draft_tokens_total") == sum(i * count for i, count in enumerate(lengths))
    positions = [value("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(i)) for i in range(3)]
    assert value("vllm:spec_decode_num_accepted_tokens_total") == sum(positions) > 0
    assert all(0 < value("outrider:acceptance_conditional", position=str(i)) <= 1 for i in range(3))
    counts = {name: value(f"vllm:{name}_count") for name in HISTOGRAMS}
    assert counts["request_params_n"] == 3
    assert counts["e2e_request_latency_seconds"] == counts["request_queue_time_seconds"] == 16
    first = counts["time_to_first_token_seconds"]
    assert first == counts["request_prefill_time_seconds"] == 15
    assert counts["inter_token_latency_seconds"] + first == num_steps
    emitted = value("vllm:generation_tokens_total") + value("vllm:prompt_tokens_total") - 3
    assert value("vllm:iteration_tokens_total_sum") == emitted
    assert min(value("outrider:steps_total", kind=kind) for kind in ("draft", "plain")) > 0
    assert value("outrider:step_part_seconds_total", part="target") > 0
    assert 0 < value("vllm:kv_cache_usage_perc") < 1
    assert (slots.in_flight, slots.waiting, slots.waiting_tokens) == (0, 0, 0)


def test_the_share_of_the_cache_counts_slots_of_ended_requests(monkeypatch):
    monkeypatch.setattr(worker, "REFRESH", -1)
    parts = replace(engine("none").parts, target=target(max_slots=4, max_context=40))

    async def work(service):
        for i in range(4):
            await made(service, task(str(i), [3 + i] * 30, most=4))
        return service.metrics.value("vllm:kv_cache_usage_perc")

    # The newest token of a text is in no cache.
    assert run(Engine(parts, max_slots=1, max_warm_slots=3), work) == 4 * 33 / (4 * 40)


def test_limits_that_are_negative_are_refused():
    with pytest.raises(InputError, match="request_timeout must be >= 0, got -1"):
        Limits(request_timeout=-1)
