"""Names and numbers of /metrics, read as Prometheus reads them."""

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as families

from outrider.core.types import Step, Timing
from outrider.serve.prometheus import Gauges, Metrics, Served

COUNTERS = (
    *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "prompt_tokens"),
    *("prompt_tokens_cached", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions"),
)
HISTOGRAMS = (
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens"),
    *("request_generation_tokens", "request_params_n", "request_params_max_tokens", "iteration_tokens_total"),
)


def metrics(**fields) -> Metrics:
    return Metrics("m", depth=3, max_context=256, **fields)


def samples(metrics: Metrics) -> dict[tuple[str, str], float]:
    """Each sample by its name and its last label that is neither the model's nor the engine's."""
    text, kind = metrics.exposition()
    assert kind.startswith("text/plain; version=0.0.4")
    found = {}
    for family in families(text.decode()):
        for each in family.samples:
            labels = {name: value for name, value in each.labels.items() if name not in ("model_name", "engine")}
            if each.name.startswith("vllm:"):
                assert (each.labels["model_name"], each.labels["engine"]) == ("m", "0"), each
            found[each.name, ",".join(labels.values())] = each.value
    return found


def step(drafted: int, accepted: int, emitted: int) -> Step:
    return Step(
        request="r",
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        tokens=tuple(range(emitted)),
        timing=Timing(target=0.25, drafter=0.5),
        num_requests=2,
    )


def test_every_series_is_there_before_the_first_request():
    found = samples(metrics())
    for name in COUNTERS:
        assert found[f"vllm:{name}_total", ""] == 0
    for name in HISTOGRAMS:
        assert found[f"vllm:{name}_count", ""] == 0
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert found[f"vllm:{name}", ""] == 0
    for position in range(3):
        assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total", str(position)] == 0
    for reason in ("stop", "length", "abort", "error"):
        assert found["vllm:request_success_total", reason] == 0
    assert not [name for name, _ in found if name.endswith("_created")]


def test_steps_are_counted_by_request():
    told = metrics()
    told.stepped([step(3, 2, 3), step(0, 0, 1)])
    told.stepped([step(2, 0, 1)], prefilled=10)
    found = samples(told)
    assert found["vllm:spec_decode_num_drafts_total", ""] == 2
    assert found["vllm:spec_decode_num_draft_tokens_total", ""] == 5
    assert found["vllm:spec_decode_num_accepted_tokens_total", ""] == 2
    positions = [found["vllm:spec_decode_num_accepted_tokens_per_pos_total", str(i)] for i in range(3)]
    assert positions == [1, 1, 0]
    assert found["vllm:generation_tokens_total", ""] == 5
    assert (found["outrider:tokens_per_step_sum", ""], found["outrider:tokens_per_step_count", ""]) == (5, 3)
    assert found["outrider:steps_total", "draft"] == 2
    assert found["outrider:step_part_seconds_total", "drafter"] == 1.0
    assert found["outrider:speculation_length_total", "2"] == 1
    assert found["vllm:iteration_tokens_total_sum", ""] == 15


def test_requests_are_counted_when_they_end():
    told = metrics()
    told.submitted(2)
    told.began(0.25)
    told.waited(0.125)
    done = Served(
        reason="length",
        prompt_tokens=10,
        cached_tokens=4,
        tokens=5,
        max_tokens=5,
        queued=0.5,
        first=0.25,
        rest=2.0,
        total=2.75,
    )
    told.ended(done)
    told.refused("queue_full")
    found = samples(told)
    sums = {name: found[f"vllm:{name}_sum", ""] for name in HISTOGRAMS}
    assert sums["time_to_first_token_seconds"] == 0.25
    assert sums["inter_token_latency_seconds"] == 0.125
    assert sums["request_time_per_output_token_seconds"] == 0.5
    assert sums["request_queue_time_seconds"] == 0.5
    assert sums["request_prefill_time_seconds"] == 0.25
    assert sums["request_inference_time_seconds"] == 2.25
    assert sums["e2e_request_latency_seconds"] == 2.75
    assert sums["request_params_n"] == 2
    assert found["vllm:request_success_total", "length"] == 1
    assert found["vllm:prompt_tokens_cached_total", ""] == 4
    assert found["vllm:admission_rejections_total", "queue_full"] == 1


@pytest.mark.parametrize("reason", ["stop", "length", "cancelled", "error"])
def test_a_request_without_a_slot_has_no_times(reason):
    told = metrics()
    told.ended(
        Served(
            reason=reason,
            prompt_tokens=1,
            cached_tokens=0,
            tokens=0,
            max_tokens=1,
            queued=None,
            first=None,
            rest=0.0,
            total=1.0,
        )
    )
    found = samples(told)
    assert found["vllm:request_queue_time_seconds_count", ""] == 0
    assert found["vllm:e2e_request_latency_seconds_count", ""] == 1


def test_gauges_are_asked_at_each_scrape():
    now = [Gauges(running=3, waiting=2, cache_use=0.5, acceptance=(0.75,))]
    told = metrics(gauges=lambda: now[0])
    found = samples(told)
    assert (found["vllm:num_requests_running", ""], found["vllm:num_requests_waiting_by_reason", "capacity"]) == (3, 2)
    assert found["outrider:acceptance_conditional", "0"] == 0.75
    now[0] = Gauges()
    assert samples(told)["vllm:num_requests_running", ""] == 0


def test_open_metrics_are_given_where_they_are_accepted():
    text, kind = metrics(cache={"slots": "8"}).exposition("application/openmetrics-text; version=1.0.0, text/plain;q=0.5")
    assert kind.startswith("application/openmetrics-text")
    names = {family.name for family in open_metrics(text.decode())}
    assert {"vllm:spec_decode_num_drafts", "vllm:cache_config", "outrider:steps"} <= names


def test_two_servers_count_apart():
    first, second = metrics(), metrics()
    first.stepped([step(1, 1, 2)])
    assert samples(second)["vllm:generation_tokens_total", ""] == 0
