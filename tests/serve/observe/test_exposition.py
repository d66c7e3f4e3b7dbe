"""Names and numbers of /metrics, read as Prometheus reads them."""

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as families

from tests.serve.served import NAME, loaded, serving

COUNTERS = (
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "prompt_tokens",
    "prompt_tokens_cached",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
)
HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_max_tokens",
    "request_params_n",
    "iteration_tokens_total",
)
PROMPT = "One day, a boy named Tim went to the park with his dog. They"


@pytest.fixture
def client():
    with (
        serving(loaded(length="fixed:3")) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client


def samples(client: httpx.Client) -> dict[tuple[str, str], float]:
    """Each sample by its name and its labels that are neither the model's nor the engine's."""
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for family in families(answer.text):
        for each in family.samples:
            labels = {name: value for name, value in each.labels.items() if name not in ("model_name", "engine")}
            if each.name.startswith("vllm:"):
                assert (each.labels["model_name"], each.labels["engine"]) == (NAME, "0"), each
            found[each.name, ",".join(labels.values())] = each.value
    return found


def complete(client: httpx.Client, **fields) -> dict:
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True} | fields
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_every_series_is_there_before_the_first_request(client):
    found = samples(client)
    for name in COUNTERS:
        assert found[f"vllm:{name}_total", ""] == 0
    for name in HISTOGRAMS:
        assert found[f"vllm:{name}_count", ""] == 0
        assert found[f"vllm:{name}_bucket", "+Inf"] == 0
    for name in ("num_requests_running", "num_requests_waiting"):
        assert found[f"vllm:{name}", ""] == 0
    for position in range(3):
        assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total", str(position)] == 0
    for reason in ("stop", "length", "abort", "error"):
        assert found["vllm:request_success_total", reason] == 0
    assert not [name for name, _ in found if name.endswith("_created")]


def test_numbers_are_those_of_the_answers(client):
    told = [complete(client)["metrics"]["speculative_decoding"] for _ in range(2)]
    complete(client, n=2, temperature=1.0, seed=1)
    found = samples(client)
    answers = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1}).json()
    prompt = answers["usage"]["prompt_tokens"]
    assert found["vllm:generation_tokens_total", ""] == 4 * 24
    assert found["vllm:prompt_tokens_total", ""] == 4 * prompt
    assert found["vllm:request_success_total", "length"] == 4
    assert found["vllm:spec_decode_num_drafts_total", ""] >= sum(each["num_spec_steps"] for each in told) > 0
    accepted = found["vllm:spec_decode_num_accepted_tokens_total", ""]
    positions = [found["vllm:spec_decode_num_accepted_tokens_per_pos_total", str(i)] for i in range(3)]
    assert sum(positions) == accepted > 0
    assert positions == sorted(positions, reverse=True)
    for name in ("request_generation_tokens", "e2e_request_latency_seconds", "request_decode_time_seconds"):
        assert found[f"vllm:{name}_count", ""] == 4
    assert found["vllm:request_params_n_sum", ""] == 4
    assert found["outrider:tokens_per_step_sum", ""] == 4 * 24
    lengths = {name: value for (name, value) in found.items() if name[0] == "outrider:speculation_length_total"}
    assert sum(lengths.values()) == found["outrider:tokens_per_step_count", ""]
    assert found["outrider:steps_total", "draft"] > 0
    assert found["outrider:step_part_seconds_total", "target"] > 0


def test_http_requests_are_counted_by_route_and_status(client):
    complete(client)
    client.post("/v1/completions", json={"prompt": []})
    client.get("/v1/models/nobody")
    client.get("/no/such/route/of/many")
    found = samples(client)
    assert found["outrider:http_requests_total", "/v1/completions,200"] == 1
    assert found["outrider:http_requests_total", "/v1/completions,400"] == 1
    assert found["outrider:http_request_seconds_count", "/v1/completions"] == 2
    routes = {labels.partition(",")[0] for name, labels in found if name == "outrider:http_requests_total"}
    assert not [route for route in routes if "nobody" in route or "many" in route]


def test_open_metrics_are_given_where_they_are_accepted(client):
    answer = client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    names = {family.name for family in open_metrics(answer.text)}
    assert {"vllm:spec_decode_num_drafts", "vllm:cache_config", "outrider:steps"} <= names
