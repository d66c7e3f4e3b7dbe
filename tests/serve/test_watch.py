"""The numbers of a service add up to what its outputs say."""

from dataclasses import replace

import pytest

from outrider.core.inputs import InputError
from outrider.engine.engine import Engine
from outrider.serve.observe.watch import Histogram
from outrider.serve.run import worker
from outrider.serve.run.job import RequestSpeculation
from outrider.serve.run.service import Limits
from tests.serve.services import job, made, read, run, until
from tests.world.models import engine, target


def test_numbers_add_up_to_the_outputs():
    async def work(service):
        prompt = [5, 6, 7] * 12
        jobs = [job(str(i), [*prompt, 4 + i], most=10 + i) for i in range(12)]
        off = job("off", prompt, speculation=RequestSpeculation(enabled=False))
        found = await made(service, *jobs, off)
        left, other = service.submit([job("left", most=200), job("other", most=30)])
        await left.__anext__()
        left.cancel()
        found += [await read(other), await read(left)]
        # Events come before the numbers are complete.
        await until(lambda: not service.in_flight)
        await service.score([3, 4, 5], 0)
        return found, service.watch, service.places

    found, watch, places = run(engine("model", gamma=3, max_slots=4), work)
    steps = [event.update.step for each in found for event in each.events if event.update.step is not None]
    outputs = [each.output for each in found]
    assert watch.finished == {"stop": 0, "length": 15, "abort": 1, "error": 0}
    assert watch.generation_tokens == sum(len(output.tokens) for output in outputs)
    assert watch.cancelled_tokens == len(outputs[-1].tokens)
    assert watch.prompt_tokens == sum(output.prompt_tokens for output in outputs) + 3
    assert watch.cached_tokens == sum(output.reused_tokens for output in outputs)
    assert watch.cached_tokens > 0
    # One event was read apart.
    assert watch.num_steps == len(steps) + 1
    assert sum(watch.lengths.values()) == watch.num_steps
    assert watch.num_drafts == watch.num_steps - watch.lengths[0]
    assert watch.num_draft_tokens == sum(length * count for length, count in watch.lengths.items())
    assert watch.num_accepted_tokens == sum(watch.accepted_per_position)
    assert len(watch.accepted_per_position) == watch.depth == 3
    assert all(share is not None and 0 <= share <= 1 for share in watch.conditional)
    assert watch.request_n.count == 3
    assert watch.e2e_latency.count == watch.queue_time.count == 16
    assert watch.time_to_first_token.count == watch.prefill_time.count == 15
    assert watch.inter_token_latency.count + watch.time_to_first_token.count == watch.num_steps
    assert watch.iteration_tokens.sum == watch.generation_tokens + watch.prompt_tokens - 3
    assert min(watch.steps["draft"], watch.steps["plain"]) > 0
    assert watch.part_seconds["target"] > 0
    assert sum(each.count for each in watch.step_seconds.values()) == sum(watch.steps.values())
    assert 0 < watch.cache_use < 1
    assert (places.in_flight, places.waiting, places.waiting_tokens) == (0, 0, 0)


def test_the_share_of_the_cache_counts_slots_of_ended_requests(monkeypatch):
    monkeypatch.setattr(worker, "REFRESH", -1)
    parts = replace(engine("none").parts, target=target(max_slots=4, max_context=40))

    async def work(service):
        for i in range(4):
            await made(service, job(str(i), [3 + i] * 30, most=4))
        return service.watch.cache_use

    # The newest token of a text is in no cache.
    assert run(Engine(parts, max_slots=1, max_warm_slots=3), work) == 4 * 33 / (4 * 40)


def test_histograms_count_by_upper_bounds():
    sizes = Histogram((1, 2.5))
    for value in (0.5, 1, 1.1, 2.5, 3):
        sizes.note(value)
    assert (sizes.counts, sizes.count, sizes.sum) == ([2, 2, 1], 5, pytest.approx(8.1))


def test_limits_that_are_negative_are_refused():
    with pytest.raises(InputError, match="request_timeout must be >= 0, got -1"):
        Limits(request_timeout=-1)
