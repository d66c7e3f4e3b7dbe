"""Spans for OpenTelemetry (extra `otel`): one for each request that was taken, with vLLM's attributes and no text."""

import importlib.util
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from outrider.core.inputs import InputError, needs, shown
from outrider.serve.outputs import Choice, usage_of

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

SPAN = "llm_request"
"""The name of a span, as in vLLM."""
LIBRARIES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
"""What the extra `otel` installs."""
TRACE_HEADERS = ("traceparent", "tracestate")
"""Headers that name the span to which a request belongs."""
CHATS = ("chat", "messages", "responses")
"""Words in the paths of routes that answer conversations."""


class Traces:
    """Where spans go.

    Args:
        provider: Makes tracers.
    """

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("outrider")
        self._parents = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str) -> "Traces":
        """Traces that are sent to a collector, in batches and from a thread of their own.

        Args:
            endpoint: The collector's URL for traces by OTLP over HTTP, such as `http://127.0.0.1:4318/v1/traces`.

        Raises:
            InputError: It is no such URL, or the extra `otel` is not installed.
        """
        if not endpoint.startswith(("http://", "https://")):
            raise InputError(f"otlp_traces_endpoint must begin with http:// or https://, got {shown(endpoint)}")
        for library in LIBRARIES:
            if not _is_installed(library):
                raise needs("--otlp-traces-endpoint", library, "otel")
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        provider = TracerProvider(resource=Resource.create({"service.name": "outrider"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider)

    def add(self, headers: Mapping[str, str], attributes: Mapping[str, Any], *, seconds: float, failed: bool) -> None:
        """Make the span of a request that ends now.

        Args:
            headers: Those of the request, which may name the span that it belongs to.
            seconds: What the request took.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode

        parent = self._parents.extract({name: headers[name] for name in TRACE_HEADERS if name in headers})
        end = time.time_ns()
        span = self._tracer.start_span(
            SPAN, context=parent, kind=SpanKind.SERVER, attributes=attributes, start_time=end - int(1e9 * seconds)
        )
        if failed:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end)

    def close(self) -> None:
        """Send what is left."""
        shutdown = getattr(self._provider, "shutdown", None)
        if shutdown is not None:
            shutdown()


def attributes_of(id: str, path: str, model: str, verifier: str, choices: Sequence[Choice]) -> dict[str, Any]:
    """The attributes of a request's span: what was asked, and what came. No prompt and no output is among them.

    Args:
        id: The request's name.
        path: The path of its route.
        verifier: The verifier's name.
    """
    counts, options = usage_of(choices), choices[0].job.options
    found: dict[str, Any] = {
        "gen_ai.operation.name": "chat" if any(word in path for word in CHATS) else "text_completion",
        "gen_ai.system": "outrider",
        "gen_ai.request.id": id,
        "gen_ai.request.n": sum(choice.prompt == choices[0].prompt for choice in choices),
        "gen_ai.request.max_tokens": options.max_new_tokens,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": [choice.finish_reason or "abort" for choice in choices],
        "gen_ai.usage.num_sequences": len(choices),
    }
    for name in ("prompt_tokens", "input_tokens"):
        found[f"gen_ai.usage.{name}"] = counts["prompt_tokens"]
    for name in ("completion_tokens", "output_tokens"):
        found[f"gen_ai.usage.{name}"] = counts["completion_tokens"]
    if options.sampling is not None:
        found["gen_ai.request.temperature"] = options.sampling.temperature
        found["gen_ai.request.top_p"] = options.sampling.top_p
    return found | _latencies(choices) | _speculation(choices, verifier)


def _latencies(choices: Sequence[Choice]) -> dict[str, float]:
    """Where the time of a request went, in seconds; what did not happen is left out."""
    times = [choice.times for choice in choices if choice.times is not None]
    queued = min((each.queued for each in times), default=None)
    admitted = min((each.admitted for each in times if each.admitted is not None), default=None)
    first = min((each.first for each in times if each.first is not None), default=None)
    last = max((each.last for each in times if each.last is not None), default=None)
    spans = {
        "e2e": (queued, last),
        "time_in_queue": (queued, admitted),
        "time_to_first_token": (queued, first),
        "time_in_model_prefill": (admitted, first),
        "time_in_model_decode": (first, last),
        "time_in_model_inference": (admitted, last),
    }
    return {
        f"gen_ai.latency.{name}": end - start
        for name, (start, end) in spans.items()
        if start is not None and end is not None
    }


def _speculation(choices: Sequence[Choice], verifier: str) -> dict[str, Any]:
    """How a request was drafted; nothing where nothing was."""
    drafted = [count for choice in choices for count in choice.tally.drafted]
    drafts = sum(count > 0 for count in drafted)
    if not drafts:
        return {}
    accepted = sum(sum(choice.tally.accepted) for choice in choices)
    return {
        "outrider.speculation.mean_acceptance_length": 1 + accepted / drafts,
        "outrider.speculation.draft_tokens": sum(drafted),
        "outrider.speculation.accepted_tokens": accepted,
        "outrider.speculation.length_mean": sum(drafted) / len(drafted),
        "outrider.speculation.verifier": verifier,
    }


def _is_installed(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except ModuleNotFoundError:
        return False
