"""GET /metrics: vLLM's names with vLLM's meanings, and Outrider's own below `outrider:`.

A label names the model, a reason or the kind of a step, never a request.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from fastapi import APIRouter
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from outrider.serve.api.answers import LEFT
from outrider.serve.api.openapi import answers
from outrider.serve.observe.watch import TO_FIRST, Histogram
from outrider.serve.run.service import Service

REFUSALS = ("queue_full", "too_many_tokens_queued", "too_many_requests_per_key")
"""Codes of refusals that are there from the start."""
COUNTERS = {
    "spec_decode_num_drafts": ("num_drafts", "Steps of requests that drafted."),
    "spec_decode_num_draft_tokens": ("num_draft_tokens", "Draft tokens; of trees all nodes."),
    "spec_decode_num_accepted_tokens": ("num_accepted_tokens", "Accepted draft tokens."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens."),
    "prompt_tokens_cached": ("cached_tokens", "Prompt tokens that needed no prefill."),
    "generation_tokens": ("generation_tokens", "Tokens of outputs."),
    "prefix_cache_queries": ("prompt_tokens", "Prompt tokens that were looked up."),
    "prefix_cache_hits": ("cached_tokens", "Prompt tokens that were found."),
}
"""vLLM's counters: the attribute of `Watch`, and what it counts."""
HISTOGRAMS = {
    "time_to_first_token_seconds": ("time_to_first_token", "From arrival to the first token."),
    "inter_token_latency_seconds": ("inter_token_latency", "Between two updates of a request."),
    "request_time_per_output_token_seconds": ("time_per_output_token", "Decoding time per further token."),
    "e2e_request_latency_seconds": ("e2e_latency", "From arrival to the end."),
    "request_queue_time_seconds": ("queue_time", "From arrival to the slot."),
    "request_inference_time_seconds": ("inference_time", "From the slot to the end."),
    "request_prefill_time_seconds": ("prefill_time", "From the slot to the first token."),
    "request_decode_time_seconds": ("decode_time", "From the first to the last token."),
    "request_prompt_tokens": ("request_prompt_tokens", "Tokens of a prompt."),
    "request_generation_tokens": ("request_generation_tokens", "Tokens of an output."),
    "request_params_max_tokens": ("request_max_tokens", "Most tokens of an output."),
    "request_params_n": ("request_n", "Outputs of a request."),
    "iteration_tokens_total": ("iteration_tokens", "Tokens of an iteration."),
}
"""vLLM's histograms: the attribute of `Watch`, and what it measures."""

router = APIRouter()
Families = Iterator[Metric]


@router.get("/metrics", response_class=Response, responses=answers("text/plain", "application/openmetrics-text"))
async def metrics(request: Request) -> Response:
    """The numbers of the server, for Prometheus."""
    found: Metrics = request.app.state.metrics
    content, kind = found.exposition(request.headers.get("accept", ""))
    return Response(content, headers={"content-type": kind})


class Metrics(Collector):
    """The numbers of one server, read from its service when they are asked for.

    Args:
        unread: Returns how many outputs no parser could read.
    """

    def __init__(self, service: Service, *, unread: Callable[[], int] = lambda: 0) -> None:
        self._service = service
        self._unread = unread
        self._values = [service.names[0], "0"]
        self._answers: Counter[tuple[str, str]] = Counter()
        self._seconds: dict[str, Histogram] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Count an HTTP request.

        Args:
            route: The template of its path.
        """
        self._answers[route, str(status)] += 1
        self._seconds.setdefault(route, Histogram(TO_FIRST)).note(seconds)

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """All numbers as text, and its media type.

        Args:
            accept: The header `Accept` of the request.
        """
        encode, kind = choose_encoder(accept)
        return encode(self._registry), kind

    def collect(self) -> Families:
        """All numbers."""
        yield from self._requests()
        yield from self._speculation()
        yield from self._queue()
        yield from self._steps()
        yield from self._http()

    def _requests(self) -> Families:
        watch = self._service.watch
        for name, (attribute, words) in COUNTERS.items():
            yield self._counter(name, words, {(): getattr(watch, attribute)})
        yield self._counter("num_preemptions", "Requests that lost their slot: none does.", {(): 0})
        ends = {(reason,): count for reason, count in watch.finished.items()}
        yield self._counter("request_success", "Outputs that ended.", ends, "finished_reason")
        refused = {(code,): 0 for code in REFUSALS} | {(code,): n for code, n in watch.rejections.items()}
        yield self._counter("admission_rejections", "Requests that were not admitted.", refused, "reason")
        for name, (attribute, words) in HISTOGRAMS.items():
            family = HistogramMetricFamily(f"vllm:{name}", words, labels=["model_name", "engine"])
            _fill(family, self._values, getattr(watch, attribute))
            yield family

    def _speculation(self) -> Families:
        watch = self._service.watch
        positions = {(str(i),): count for i, count in enumerate(watch.accepted_per_position)}
        yield self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by depth.", positions, "position"
        )
        lengths = dict.fromkeys(range(watch.depth + 1), 0) | dict(watch.lengths)
        by_length = {(str(length),): count for length, count in lengths.items()}
        yield _own_counter("speculation_length", "Steps of requests by draft tokens.", by_length, "length")
        summary = SummaryMetricFamily("outrider:tokens_per_step", "Tokens that a request gets of a step.")
        summary.add_metric([], count_value=watch.num_steps, sum_value=watch.generation_tokens)
        yield summary
        conditional = GaugeMetricFamily(
            "outrider:acceptance_conditional",
            "Acceptance of a draft token if those before it are accepted, a moving average.",
            labels=["position"],
        )
        for i, share in enumerate(watch.conditional):
            if share is not None:
                conditional.add_metric([str(i)], share)
        yield conditional

    def _queue(self) -> Families:
        service, places = self._service, self._service.places
        waiting = places.waiting
        yield self._gauge("num_requests_running", "Requests with a slot.", {(): places.in_flight - waiting})
        yield self._gauge("num_requests_waiting", "Requests without a slot.", {(): waiting})
        reasons = {("capacity",): waiting, ("deferred",): 0}
        yield self._gauge("num_requests_waiting_by_reason", "Requests without a slot.", reasons, "reason")
        use = {(): service.watch.cache_use}
        yield self._gauge("kv_cache_usage_perc", "Share of the cache that holds tokens; 1 is all.", use)
        engine = service.engine
        room = {"num_slots": str(engine.max_slots), "max_model_len": str(service.max_context)}
        info = InfoMetricFamily("vllm:cache_config", "The room of the cache.", labels=["model_name", "engine"])
        info.add_metric(self._values, room)
        yield info
        yield GaugeMetricFamily("outrider:queue_tokens", "Prompt tokens that wait.", value=places.waiting_tokens)

    def _steps(self) -> Families:
        watch = self._service.watch
        kinds = {(kind,): count for kind, count in watch.steps.items()}
        yield _own_counter("steps", "Iterations of the engine.", kinds, "kind")
        parts = {(part,): seconds for part, seconds in watch.part_seconds.items()}
        yield _own_counter("step_part_seconds", "Where the time of iterations goes.", parts, "part")
        seconds = HistogramMetricFamily("outrider:step_seconds", "Time of an iteration.", labels=["kind", "batch"])
        for (kind, batch), histogram in list(watch.step_seconds.items()):
            _fill(seconds, [kind, str(batch)], histogram)
        yield seconds
        drift = self._service.engine.parts.experience.cost_drift
        yield GaugeMetricFamily("outrider:cost_drift_ratio", "Time of steps over what was measured.", value=drift)
        lost = {(): watch.cancelled_tokens}
        yield _own_counter("cancelled_tokens", "Tokens of cancelled outputs.", lost)
        yield _own_counter("timeouts", "Requests that ran out of time.", {(): watch.timeouts})

    def _http(self) -> Families:
        answers = dict(self._answers)
        yield _own_counter("http_requests", "HTTP requests.", answers, "route", "status")
        left = sum(count for (_, status), count in answers.items() if status == str(LEFT))
        yield _own_counter("disconnects", "Clients that left before their answer.", {(): left})
        yield _own_counter("parse_failures", "Outputs that no parser could read.", {(): self._unread()})
        times = HistogramMetricFamily("outrider:http_request_seconds", "Time of an HTTP request.", labels=["route"])
        for route, histogram in self._seconds.items():
            _fill(times, [route], histogram)
        yield times
        grammars = HistogramMetricFamily("outrider:grammar_compile_seconds", "Time to compile a grammar.", labels=[])
        _fill(grammars, [], self._service.watch.grammar_seconds)
        yield grammars

    def _counter(self, name: str, words: str, values: Mapping[Any, float], *labels: str) -> CounterMetricFamily:
        """A counter of vLLM's."""
        family = CounterMetricFamily(f"vllm:{name}", words, labels=["model_name", "engine", *labels])
        for each, value in values.items():
            family.add_metric([*self._values, *each], value)
        return family

    def _gauge(self, name: str, words: str, values: Mapping[Any, float], *labels: str) -> GaugeMetricFamily:
        """A gauge of vLLM's."""
        family = GaugeMetricFamily(f"vllm:{name}", words, labels=["model_name", "engine", *labels])
        for each, value in values.items():
            family.add_metric([*self._values, *each], value)
        return family


def _own_counter(name: str, words: str, values: Mapping[Any, float], *labels: str) -> CounterMetricFamily:
    family = CounterMetricFamily(f"outrider:{name}", words, labels=list(labels))
    for each, value in values.items():
        family.add_metric(list(each), value)
    return family


def _fill(family: HistogramMetricFamily, labels: Iterable[str], histogram: Histogram) -> None:
    """Add a histogram to its family."""
    counts = list(accumulate(histogram.counts))
    bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
    family.add_metric(list(labels), list(zip(bounds, counts, strict=True)), histogram.sum)
