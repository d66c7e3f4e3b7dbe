"""The numbers of /metrics: vLLM's names with vLLM's meanings, and Outrider's own below `outrider:`.

A label names the model or the kind of a step, never a request.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from outrider.core.types import Step, Timing

TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
GAPS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
COUNTS = (1, 2, 5, 10, 20)
ITERATION = (1, 8, *(2**k for k in range(4, 15)))
REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
"""vLLM's word for each way to end."""
REFUSALS = ("queue_full", "too_many_tokens_queued", "draining", "engine_dead", "overloaded")
PARTS = {"target": "target", "drafter": "drafter", "rows": "rows", "verify": "verify", "commit": "commit"}
"""Parts of a step with a name of their own; the others are the rest."""
BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Bounds of the label of batch sizes."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """A request that has ended. Times are seconds.

    Attributes:
        reason: The engine's finish reason.
        queued: From arrival to its slot; None if it got none.
        first: From its slot to its first token; None if it has none.
        rest: From its first to its last token.
        total: From arrival to its end.
    """

    reason: str
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    max_tokens: int
    queued: float | None
    first: float | None
    rest: float
    total: float


@dataclass(frozen=True, kw_only=True)
class Gauges:
    """What a scrape asks of the service.

    Attributes:
        running: Requests with a slot.
        waiting: Requests without one.
        queued_tokens: Prompt tokens of waiting requests.
        cache_use: Share of the room for keys and values that is in use, 0 to 1.
        acceptance: Of each depth, the estimated probability that a draft token is accepted if those before it are.
        cost_drift: How much slower steps are than the cost table says.
    """

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    cache_use: float = 0.0
    acceptance: Sequence[float] = ()
    cost_drift: float = 1.0


class Metrics:
    """The counts of one server, in a registry of their own.

    Args:
        model: The name of the model, a label of all of vLLM's names.
        depth: Deepest draft.
        max_context: Longest context in tokens.
        gauges: Called at each scrape.
        cache: What the cache holds, as text by name.
    """

    def __init__(
        self,
        model: str,
        *,
        depth: int,
        max_context: int,
        gauges: Callable[[], Gauges] = Gauges,
        cache: dict[str, str] | None = None,
    ) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._labels = (model, "0")
        self._ask, self._depth = gauges, depth
        self._count_requests(max_context)
        self._count_steps()
        self._count_gauges()
        Info(
            "vllm:cache_config", "The room for keys and values.", ("model_name", "engine"), registry=self._registry
        ).labels(*self._labels).info(cache or {})

    def stepped(self, steps: Sequence[Step], prefilled: int = 0) -> None:
        """Count one iteration of the engine.

        Args:
            steps: The steps of its requests.
            prefilled: Prompt tokens that it prefilled.
        """
        emitted = sum(len(step.tokens) for step in steps)
        self._iteration.observe(emitted + prefilled)
        self._generated.inc(emitted)
        for step in steps:
            self._per_step.observe(len(step.tokens))
            if step.num_draft_tokens:
                self._drafts.inc()
                self._drafted.inc(step.num_draft_tokens)
                self._accepted.inc(step.num_accepted_tokens)
                for each in self._positions[: step.num_accepted_tokens]:
                    each.inc()
        drafted = any(step.num_draft_tokens for step in steps)
        kind = "draft" if drafted else "plain" if steps else "prefill"
        self._steps.labels(kind).inc()
        for step in steps:
            self._lengths.labels(str(step.num_draft_tokens)).inc()
        if steps:
            self._timed(kind, steps[0].timing, len(steps))

    def waited(self, seconds: float) -> None:
        """Count a gap between two updates of a request."""
        self._gap.observe(seconds)

    def began(self, seconds: float) -> None:
        """Count a first token, so many seconds after the arrival of its request."""
        self._ttft.observe(seconds)

    def submitted(self, outputs: int) -> None:
        """Count a request for so many outputs."""
        self._outputs.observe(outputs)

    def ended(self, served: Served) -> None:
        """Count a request that has ended."""
        self._prompt.inc(served.prompt_tokens)
        self._cached.inc(served.cached_tokens)
        self._queries.inc(served.prompt_tokens)
        self._hits.inc(served.cached_tokens)
        self._ends[served.reason].inc()
        self._prompt_size.observe(served.prompt_tokens)
        self._output_size.observe(served.tokens)
        self._wanted.observe(served.max_tokens)
        self._total.observe(served.total)
        if served.reason == "cancelled":
            self._lost.inc(served.tokens)
        if served.queued is not None:
            self._queue.observe(served.queued)
        if served.first is not None:
            self._prefill.observe(served.first)
            self._decode.observe(served.rest)
            self._inference.observe(served.first + served.rest)
            if served.tokens > 1:
                self._per_token.observe(served.rest / (served.tokens - 1))

    def refused(self, code: str) -> None:
        """Count a request that was not admitted."""
        self._refused.labels(*self._labels, code).inc()

    def disconnected(self) -> None:
        """Count a client that left before its answer ended."""
        self._left.inc()

    def misread(self) -> None:
        """Count an output that could not be parsed for tool calls."""
        self._unread.inc()

    def compiled(self, seconds: float) -> None:
        """Count a grammar that was compiled."""
        self._grammar.observe(seconds)

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Count an HTTP request.

        Args:
            route: The template of its path.
        """
        self._http.labels(route, str(status)).inc()
        self._http_seconds.labels(route).observe(seconds)

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """All numbers as text, and its media type.

        Args:
            accept: The header `Accept` of the request.
        """
        self._look()
        encode, kind = choose_encoder(accept)
        return encode(_WithoutCreated(self._registry)), kind

    def _look(self) -> None:
        """Bring the gauges up to date."""
        now = self._ask()
        self._running.set(now.running)
        self._waiting.set(now.waiting)
        self._reasons["capacity"].set(now.waiting)
        self._use.set(now.cache_use)
        self._queued_tokens.set(now.queued_tokens)
        self._drift.set(now.cost_drift)
        for i, each in enumerate(now.acceptance):
            self._conditional.labels(str(i)).set(each)

    def _timed(self, kind: str, timing: Timing, batch: int) -> None:
        """Count where the time of an iteration went."""
        bound = next((str(each) for each in BATCHES if batch <= each), f"{BATCHES[-1]}+")
        self._seconds.labels(kind, bound).observe(timing.total)
        for part in PARTS:
            self._parts.labels(part).inc(getattr(timing, part))
        self._parts.labels("rest").inc(timing.rest + timing.replay)

    def _count_requests(self, max_context: int) -> None:
        counter, histogram = self._counter, self._histogram
        self._prompt = counter("prompt_tokens", "Prompt tokens.")
        self._cached = counter("prompt_tokens_cached", "Prompt tokens that needed no prefill.")
        self._generated = counter("generation_tokens", "Tokens of outputs.")
        self._queries = counter("prefix_cache_queries", "Prompt tokens that were looked up.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens that were found.")
        counter("num_preemptions", "Requests that lost their slot: none does.")
        success = self._family("request_success", "Requests that ended.", "finished_reason")
        self._ends = {reason: success.labels(*self._labels, word) for reason, word in REASONS.items()}
        self._refused = self._family("admission_rejections", "Requests that were not admitted.", "reason")
        for code in REFUSALS:
            self._refused.labels(*self._labels, code)
        sizes = tuple(each for k in range(10) for each in (10**k, 2 * 10**k, 5 * 10**k) if each <= max_context)
        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token.", TTFT)
        self._gap = histogram("inter_token_latency_seconds", "Between two updates of a request.", GAPS)
        self._per_token = histogram("request_time_per_output_token_seconds", "Decoding time per further token.", GAPS)
        self._total = histogram("e2e_request_latency_seconds", "From arrival to the end.", LATENCY)
        self._queue = histogram("request_queue_time_seconds", "From arrival to the slot.", LATENCY)
        self._inference = histogram("request_inference_time_seconds", "From the slot to the last token.", LATENCY)
        self._prefill = histogram("request_prefill_time_seconds", "From the slot to the first token.", LATENCY)
        self._decode = histogram("request_decode_time_seconds", "From the first to the last token.", LATENCY)
        self._prompt_size = histogram("request_prompt_tokens", "Tokens of a prompt.", sizes)
        self._output_size = histogram("request_generation_tokens", "Tokens of an output.", sizes)
        self._wanted = histogram("request_params_max_tokens", "Most tokens of an output.", sizes)
        self._outputs = histogram("request_params_n", "Outputs of a request.", COUNTS)

    def _count_steps(self) -> None:
        self._drafts = self._counter("spec_decode_num_drafts", "Steps of requests that drafted.")
        self._drafted = self._counter("spec_decode_num_draft_tokens", "Draft tokens.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Accepted draft tokens.")
        family = self._family("spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens.", "position")
        self._positions = [family.labels(*self._labels, str(i)) for i in range(self._depth)]
        self._iteration = self._histogram("iteration_tokens_total", "Tokens of an iteration.", ITERATION)
        registry = self._registry
        self._steps = Counter("outrider:steps", "Iterations of the engine.", ["kind"], registry=registry)
        self._seconds = Histogram(
            "outrider:step_seconds", "Time of an iteration.", ["kind", "batch"], buckets=GAPS, registry=registry
        )
        self._parts = Counter("outrider:step_part_seconds", "Where the time goes.", ["part"], registry=registry)
        self._per_step = Histogram(
            "outrider:tokens_per_step", "Tokens that a request gets of a step.", buckets=range(1, 18), registry=registry
        )
        self._lengths = Counter("outrider:speculation_length", "Steps by draft tokens.", ["length"], registry=registry)
        for kind in ("plain", "draft", "prefill"):
            self._steps.labels(kind)
        for part in (*PARTS, "rest"):
            self._parts.labels(part)
        for length in range(self._depth + 1):
            self._lengths.labels(str(length))

    def _count_gauges(self) -> None:
        gauge, registry, labels = self._gauge, self._registry, ("model_name", "engine")
        self._running = gauge("num_requests_running", "Requests with a slot.")
        self._waiting = gauge("num_requests_waiting", "Requests without a slot.")
        self._use = gauge("kv_cache_usage_perc", "Share of the room for keys and values in use; 1 is all.")
        why = Gauge("vllm:num_requests_waiting_by_reason", "Why.", [*labels, "reason"], registry=registry)
        self._reasons = {reason: why.labels(*self._labels, reason) for reason in ("capacity", "deferred")}
        self._conditional = Gauge(
            "outrider:acceptance_conditional",
            "Estimated acceptance of a draft token if those before it are accepted.",
            ["position"],
            registry=registry,
        )
        self._drift = Gauge("outrider:cost_drift_ratio", "Time of steps over what was measured.", registry=registry)
        self._queued_tokens = Gauge("outrider:queue_tokens", "Prompt tokens that wait.", registry=registry)
        self._left = Counter("outrider:disconnects", "Clients that left.", registry=registry)
        self._lost = Counter("outrider:cancelled_tokens", "Tokens of cancelled outputs.", registry=registry)
        self._unread = Counter("outrider:parse_failures", "Outputs that no parser could read.", registry=registry)
        self._grammar = Histogram(
            "outrider:grammar_compile_seconds", "Time to compile a grammar.", buckets=GAPS, registry=registry
        )
        self._http = Counter("outrider:http_requests", "HTTP requests.", ["route", "status"], registry=registry)
        self._http_seconds = Histogram(
            "outrider:http_request_seconds", "Time of an HTTP request.", ["route"], buckets=TTFT, registry=registry
        )

    def _family(self, name: str, words: str, label: str) -> Counter:
        """A counter of vLLM's with one label more."""
        return Counter(f"vllm:{name}", words, ["model_name", "engine", label], registry=self._registry)

    def _counter(self, name: str, words: str) -> Counter:
        return Counter(f"vllm:{name}", words, ["model_name", "engine"], registry=self._registry).labels(*self._labels)

    def _gauge(self, name: str, words: str) -> Gauge:
        return Gauge(f"vllm:{name}", words, ["model_name", "engine"], registry=self._registry).labels(*self._labels)

    def _histogram(self, name: str, words: str, buckets: Iterable[float]) -> Histogram:
        labels = ["model_name", "engine"]
        made = Histogram(f"vllm:{name}", words, labels, buckets=tuple(buckets), registry=self._registry)
        return made.labels(*self._labels)


class _WithoutCreated(Collector):
    """A registry without the times at which its series began: clients that match names by their beginning would add
    them to the counts.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [each for each in metric.samples if not each.name.endswith("_created")]
            yield metric
