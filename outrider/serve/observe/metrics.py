"""The numbers of a server, for Prometheus: vLLM's names with vLLM's meanings, and Outrider's own below `outrider:`.

A label names the model, a reason or the kind of a step, never a request.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, Summary, disable_created_metrics
from prometheus_client.exposition import choose_encoder

from outrider.core.types import Step
from outrider.engine.output import Output, Times, Update
from outrider.serve.errors import LEFT

_SHORT = (0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LONG = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TO_FIRST = (*_LONG, 160, 640, 2560)
"""Bounds, in seconds, of the time to the first token; like all bounds here those of vLLM."""
BETWEEN = (0.001, 0.0025, 0.005, 0.01, *_SHORT)
"""Bounds, in seconds, of the time between tokens, with shorter ones for small models."""
WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
"""Bounds, in seconds, of what a whole request takes."""
ITERATION = (1, 8, *(2**i for i in range(4, 15)))
"""Bounds of the tokens of one step."""
OUTPUTS = (1, 2, 5, 10, 20)
"""Bounds of the outputs of one prompt."""
KINDS = ("plain", "draft", "prefill")
"""Kinds of steps: without drafts, with drafts, and the prefill of prompts beside them."""
PARTS = ("target", "drafter", "rows", "verify", "commit", "replay", "rest")
"""Parts of a step's time."""
REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
"""Why outputs end, in the engine's words and in vLLM's."""
REFUSALS = ("queue_full", "too_many_tokens_queued", "too_many_requests_per_key")
"""Codes of refusals."""
MEMORY = 0.02
"""Weight of the newest value in moving averages."""
Numbers = Callable[..., Any]
"""Returns the number with some labels."""
VLLM = "vllm:"
"""Names that begin so have labels of the model and the engine, as in vLLM."""
# Neither vLLM nor Outrider says when each number was made.
disable_created_metrics()


def token_bounds(most: int) -> tuple[int, ...]:
    """The bounds 1, 2, 5, 10, 20, 50 ... up to a number of tokens.

    Example:
        >>> token_bounds(30)
        (1, 2, 5, 10, 20)
    """
    return tuple(digit * 10**power for power in range(12) for digit in (1, 2, 5) if digit * 10**power <= most)


COUNTERS: dict[str, tuple[str, str, Sequence[object]]] = {
    "vllm:spec_decode_num_drafts": ("Steps of requests that drafted.", "", ()),
    "vllm:spec_decode_num_draft_tokens": ("Draft tokens; of trees all nodes.", "", ()),
    "vllm:spec_decode_num_accepted_tokens": ("Accepted draft tokens.", "", ()),
    "vllm:prompt_tokens": ("Prompt tokens.", "", ()),
    "vllm:prompt_tokens_cached": ("Prompt tokens that needed no prefill.", "", ()),
    "vllm:generation_tokens": ("Tokens of outputs.", "", ()),
    "vllm:prefix_cache_queries": ("Prompt tokens that were looked up.", "", ()),
    "vllm:prefix_cache_hits": ("Prompt tokens that the cache had.", "", ()),
    "vllm:num_preemptions": ("Requests that lost their slot: none does.", "", ()),
    "vllm:request_success": ("Outputs that ended.", "finished_reason", tuple(REASONS.values())),
    "vllm:admission_rejections": ("Requests that were not admitted.", "reason", REFUSALS),
    "outrider:steps": ("Iterations of the engine.", "kind", KINDS),
    "outrider:step_part_seconds": ("Where the time of iterations goes.", "part", PARTS),
    "outrider:cancelled_tokens": ("Tokens of cancelled outputs.", "", ()),
    "outrider:timeouts": ("Requests that ran out of time.", "", ()),
    "outrider:disconnects": ("Clients that left before their answer.", "", ()),
    "outrider:parse_failures": ("Outputs that no parser could read.", "", ()),
}
"""What each counter counts, its label, and the label's values that are there from the start."""
HISTOGRAMS: dict[str, tuple[str, Sequence[float] | None]] = {
    "vllm:time_to_first_token_seconds": ("From arrival to the first token.", TO_FIRST),
    "vllm:inter_token_latency_seconds": ("Between two updates of a request.", BETWEEN),
    "vllm:request_time_per_output_token_seconds": ("Decoding time per further token.", BETWEEN),
    "vllm:e2e_request_latency_seconds": ("From arrival to the end.", WHOLE),
    "vllm:request_queue_time_seconds": ("From arrival to the slot.", WHOLE),
    "vllm:request_inference_time_seconds": ("From the slot to the end.", WHOLE),
    "vllm:request_prefill_time_seconds": ("From the slot to the first token.", WHOLE),
    "vllm:request_decode_time_seconds": ("From the first to the last token.", WHOLE),
    "vllm:request_prompt_tokens": ("Tokens of a prompt.", None),
    "vllm:request_generation_tokens": ("Tokens of an output.", None),
    "vllm:request_params_max_tokens": ("Most tokens of an output.", None),
    "vllm:request_params_n": ("Outputs of a request.", OUTPUTS),
    "vllm:iteration_tokens_total": ("Tokens of an iteration.", ITERATION),
    "outrider:grammar_compile_seconds": ("Time to compile a grammar.", BETWEEN),
}
"""What each histogram measures, and its bounds; None: those of tokens up to a context."""


class ServerMetrics:
    """What a server has done so far. One thread writes each number; any thread may read.

    Args:
        model: The model's name.
        max_context: Longest context in tokens.
        depth: Deepest draft that the length policy allows.
    """

    def __init__(self, *, model: str, max_context: int, depth: int) -> None:
        self._registry = CollectorRegistry()
        self._labels = (model, "0")
        self._latency: float | None = None
        self._updated: dict[str, float] = {}
        self._conditional: dict[int, float] = {}
        by_depth = {
            "vllm:spec_decode_num_accepted_tokens_per_pos": (
                "Accepted draft tokens by depth.",
                "position",
                range(depth),
            ),
            "outrider:speculation_length": ("Steps of requests by draft tokens.", "length", range(depth + 1)),
        }
        self._counters = {name: self._made(Counter, name, *row[:2]) for name, row in (COUNTERS | by_depth).items()}
        # A series that appears late is lost to whoever takes differences.
        for name, (_, label, values) in (COUNTERS | by_depth).items():
            for labels in zip(values) if label else [()]:
                self._counters[name](*labels)
        lengths = token_bounds(max_context)
        self._histograms = {
            name: self._made(Histogram, name, words, buckets=lengths if bounds is None else bounds)()
            for name, (words, bounds) in HISTOGRAMS.items()
        }
        self._per_step = self._made(Summary, "outrider:tokens_per_step", "Tokens that a request gets of a step.")()
        words = "Acceptance of a draft token if those before it are accepted, a moving average."
        self._acceptance = self._made(Gauge, "outrider:acceptance_conditional", words, "position")
        words = "Share of the cache that holds tokens; 1 is all."
        self._cache_use = self._made(Gauge, "vllm:kv_cache_usage_perc", words)()
        self._seconds = self._made(
            Histogram, "outrider:step_seconds", "Time of an iteration.", "kind", "batch", buckets=BETWEEN
        )
        self._answers = self._made(Counter, "outrider:http_requests", "HTTP requests.", "route", "status")
        self._answer_seconds = self._made(
            Histogram, "outrider:http_request_seconds", "Time of an HTTP request.", "route", buckets=TO_FIRST
        )

    def watch_queue(self, running: Callable[[], int], waiting: Callable[[], int], tokens: Callable[[], int]) -> None:
        """Read from now on how many requests run and wait, and how many prompt tokens wait."""
        words = "Requests without a slot."
        reasons = self._made(Gauge, "vllm:num_requests_waiting_by_reason", words, "reason")
        reasons("capacity").set_function(waiting)
        reasons("deferred")
        self._made(Gauge, "vllm:num_requests_waiting", words)().set_function(waiting)
        self._made(Gauge, "vllm:num_requests_running", "Requests with a slot.")().set_function(running)
        self._made(Gauge, "outrider:queue_tokens", "Prompt tokens that wait.")().set_function(tokens)

    def watch_engine(self, room: Mapping[str, str], drift: Callable[[], float]) -> None:
        """Tell the room of the cache, and read from now on how far the costs of steps have drifted."""
        self._made(Info, "vllm:cache_config", "The room of the cache.")().info(dict(room))
        words = "Time of steps over what was measured."
        self._made(Gauge, "outrider:cost_drift_ratio", words)().set_function(drift)

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """All numbers as text, and its media type.

        Args:
            accept: The header `Accept` of the request.
        """
        encode, kind = choose_encoder(accept)
        return encode(self._registry), kind

    def value(self, name: str, **labels: str) -> float:
        """One sample, such as `value("vllm:request_success_total", finished_reason="stop")`; 0 before the first."""
        if name.startswith(VLLM):
            labels |= dict(zip(("model_name", "engine"), self._labels, strict=True))
        return self._registry.get_sample_value(name, labels) or 0.0

    def wait(self, waiting: int, slots: int) -> float:
        """Seconds until a request that comes now might get a slot, 1 .. 60, by what requests took so far.

        Args:
            waiting: Number of requests that wait already.
            slots: Number of requests that run at once.
        """
        usual = 1.0 if self._latency is None else self._latency
        return min(60.0, max(1.0, usual * (waiting + 1) / slots))

    def note_answer(self, route: str, status: int, seconds: float) -> None:
        """Note an HTTP request.

        Args:
            route: The template of its path.
        """
        self._answers(route, str(status)).inc()
        self._answer_seconds(route).observe(seconds)
        if status == LEFT:
            self._count("outrider:disconnects", 1)

    def note_unread(self, calls: int) -> None:
        """Note tool calls that no parser could read."""
        self._count("outrider:parse_failures", calls)

    def note_grammar(self, seconds: float) -> None:
        """Note the compilation of a grammar."""
        self._observe("outrider:grammar_compile_seconds", seconds)

    def note_refusal(self, code: str) -> None:
        """Note a request that was not admitted."""
        self._count("vllm:admission_rejections", 1, code)

    def note_request(self, most_tokens: Sequence[int]) -> None:
        """Note a request, by the most tokens of each output."""
        self._observe("vllm:request_params_n", len(most_tokens))
        for most in most_tokens:
            self._observe("vllm:request_params_max_tokens", most)

    def note_timeout(self) -> None:
        """Note a request whose deadline passed."""
        self._count("outrider:timeouts", 1)

    def note_cache(self, share: float) -> None:
        """Note the share of the cache that holds tokens, those of ended requests included, 0 .. 1."""
        self._cache_use.set(share)

    def note_updates(self, updates: Sequence[Update], seconds: float, prompts: Mapping[str, int]) -> None:
        """Note what a step of the engine brought, and what it took.

        Args:
            prompts: Number of prompt tokens of each running request.
        """
        emitted, read, now = 0, 0, time.monotonic()
        for update in updates:
            emitted += len(update.tokens)
            if update.step is not None:
                self._note_step(update.step, len(update.tokens))
            times, id = update.times, update.id
            if times is not None and update.tokens:
                before = self._updated.get(id)
                if before is not None:
                    self._observe("vllm:inter_token_latency_seconds", now - before)
                elif times.first is not None:
                    self._observe("vllm:time_to_first_token_seconds", times.first - times.queued)
                    read += prompts.get(id, 0)
                self._updated[id] = now
        self._count("vllm:generation_tokens", emitted)
        self._note_read(read)
        if emitted:
            self._observe("vllm:iteration_tokens_total", emitted + read)
        for update in updates:
            if update.output is not None:
                self.note_end(update.output)
        self._note_iteration([update.step for update in updates if update.step is not None], seconds)

    def note_end(self, output: Output) -> None:
        """Note an ended output."""
        counted = self._updated.pop(output.id, None) is not None
        reason = REASONS[output.finish_reason]
        self._count("vllm:request_success", 1, reason)
        if reason == "abort":
            self._count("outrider:cancelled_tokens", len(output.tokens))
        self._observe("vllm:request_prompt_tokens", output.prompt_tokens)
        self._observe("vllm:request_generation_tokens", len(output.tokens))
        if output.times is None or output.times.admitted is None:
            return
        if not counted:
            self._note_read(output.prompt_tokens)
        self._count("vllm:prompt_tokens_cached", output.reused_tokens)
        self._count("vllm:prefix_cache_hits", output.reused_tokens)
        self._note_times(output.times, len(output.tokens))

    def _note_read(self, tokens: int) -> None:
        self._count("vllm:prompt_tokens", tokens)
        self._count("vllm:prefix_cache_queries", tokens)

    def _note_times(self, times: Times, tokens: int) -> None:
        """Note how long an ended output waited, prefilled and decoded."""
        admitted, end = times.admitted or times.queued, time.monotonic()
        self._observe("vllm:request_queue_time_seconds", admitted - times.queued)
        self._observe("vllm:e2e_request_latency_seconds", end - times.queued)
        self._observe("vllm:request_inference_time_seconds", end - admitted)
        before = end - admitted if self._latency is None else self._latency
        self._latency = before + 0.1 * (end - admitted - before)
        if times.first is None or times.last is None:
            return
        self._observe("vllm:request_prefill_time_seconds", times.first - admitted)
        self._observe("vllm:request_decode_time_seconds", times.last - times.first)
        if tokens > 1:
            self._observe("vllm:request_time_per_output_token_seconds", (times.last - times.first) / (tokens - 1))

    def _note_step(self, step: Step, tokens: int) -> None:
        """Note the step of one request, and how many tokens it brought."""
        drafted, accepted = step.num_draft_tokens, step.num_accepted_tokens
        self._per_step.observe(tokens)
        self._count("outrider:speculation_length", 1, drafted)
        if not drafted:
            return
        self._count("vllm:spec_decode_num_drafts", 1)
        self._count("vllm:spec_decode_num_draft_tokens", drafted)
        self._count("vllm:spec_decode_num_accepted_tokens", accepted)
        for i in range(accepted):
            self._count("vllm:spec_decode_num_accepted_tokens_per_pos", 1, i)
        for i in range(min(accepted + 1, drafted)):
            passed = float(i < accepted)
            before = self._conditional.get(i, passed)
            self._conditional[i] = before + MEMORY * (passed - before)
            self._acceptance(i).set(self._conditional[i])

    def _note_iteration(self, steps: Sequence[Step], seconds: float) -> None:
        """Note the forwards of one step of the engine, each by its own clock; the time beside them is prefill."""
        for step in {id(step.timing): step for step in steps}.values():
            drafts = any(other.num_draft_tokens for other in steps if other.timing is step.timing)
            self._note_seconds("draft" if drafts else "plain", step.num_requests, step.timing.total)
            for part in PARTS:
                self._count("outrider:step_part_seconds", getattr(step.timing, part), part)
        if not steps:
            self._note_seconds("prefill", 1, seconds)

    def _note_seconds(self, kind: str, requests: int, seconds: float) -> None:
        """Note a forward. Numbers of requests are rounded up to a power of two."""
        self._count("outrider:steps", 1, kind)
        self._seconds(kind, 1 << (requests - 1).bit_length()).observe(seconds)

    def _count(self, name: str, amount: float, *labels: object) -> None:
        self._counters[name](*labels).inc(amount)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def _made(self, kind: type[Any], name: str, words: str, *labels: str, buckets: Sequence[float] = ()) -> Numbers:
        """Numbers of a name, by their labels. vLLM's have those of the model and the engine besides."""
        options = {"buckets": buckets} if buckets else {}
        names, labels = ("model_name", "engine"), tuple(filter(None, labels))
        if name.startswith(VLLM):
            return partial(
                kind(name, words, (*names, *labels), registry=self._registry, **options).labels, *self._labels
            )
        family = kind(name, words, labels, registry=self._registry, **options)
        return family.labels if labels else lambda: family
