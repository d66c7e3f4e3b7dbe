"""Spans for OpenTelemetry (extra `otel`): one for each request to a route that generates, with vLLM's attributes.

A span holds no text, unless `content` is set.
"""

import importlib.util
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from outrider.core.inputs import InputError, needs, shown
from outrider.engine.output import Times
from outrider.serve.observe.record import OutputTally, RequestRecord

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

SPAN = "llm_request"
"""The name of a span, as in vLLM."""
LIBRARIES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
"""What the extra `otel` installs."""
TRACE_HEADERS = ("traceparent", "tracestate")
"""Headers that name the span to which a request belongs."""
GENERATING = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/outrider/stream"}
)
"""The routes whose requests have spans."""
PROMPT, COMPLETION = "gen_ai.content.prompt", "gen_ai.content.completion"
"""The names of events with texts."""
CHATS = ("chat", "messages", "responses")
"""Words in the paths of routes that answer conversations."""


class Traces:
    """Where spans go.

    Attributes:
        content: Whether spans hold prompts and outputs, as events.

    Args:
        provider: Makes tracers.
    """

    def __init__(self, provider: "TracerProvider", *, content: bool = False) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.content = content
        self._provider = provider
        self._tracer = provider.get_tracer("outrider")
        self._parents = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str, *, content: bool = False) -> "Traces":
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
        return cls(provider, content=content)

    def add(self, headers: Mapping[str, str], record: RequestRecord) -> None:
        """Make the span of a request that ends now.

        Args:
            headers: Those of the request, which may name the span that it belongs to.
        """
        events: list[tuple[str, dict[str, Any]]] = []
        if self.content:
            events += [(PROMPT, {"gen_ai.prompt": text}) for text in record.prompts]
            events += [(COMPLETION, {"gen_ai.completion": text}) for text in record.texts if text is not None]
        failed = record.error is not None
        self._add(headers, attributes_of(record), seconds=record.seconds, failed=failed, events=events)

    def add_refused(
        self, headers: Mapping[str, str], id: str, path: str, status: int, code: str, seconds: float
    ) -> None:
        """Make the span of a request that got an error before it ran. Requests to routes that generate nothing have no
        spans.

        Args:
            path: The path of its URL.
            status: HTTP status of the answer.
            code: A short name of the reason.
        """
        if path in GENERATING:
            attributes = _identity(id, path) | {"http.response.status_code": status, "error.type": code}
            self._add(headers, attributes, seconds=seconds, failed=True, events=())

    def _add(
        self,
        headers: Mapping[str, str],
        attributes: Mapping[str, Any],
        *,
        seconds: float,
        failed: bool,
        events: Sequence[tuple[str, Mapping[str, Any]]],
    ) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        parent = self._parents.extract({name: headers[name] for name in TRACE_HEADERS if name in headers})
        end = time.time_ns()
        span = self._tracer.start_span(
            SPAN, context=parent, kind=SpanKind.SERVER, attributes=attributes, start_time=end - int(1e9 * seconds)
        )
        for name, values in events:
            span.add_event(name, values, end)
        if failed:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end)

    def close(self) -> None:
        """Send what is left."""
        shutdown = getattr(self._provider, "shutdown", None)
        if shutdown is not None:
            shutdown()


def attributes_of(record: RequestRecord) -> dict[str, Any]:
    """The attributes of a request's span: what was asked, and what came. No prompt and no output is among them."""
    attributes = _identity(record.id, record.path) | {
        "gen_ai.request.n": record.num_outputs,
        "gen_ai.request.max_tokens": record.options.max_new_tokens,
        "gen_ai.response.model": record.model,
        "gen_ai.response.finish_reasons": list(record.finish_reasons),
        "gen_ai.usage.num_sequences": len(record.finish_reasons),
    }
    for name in ("prompt_tokens", "input_tokens"):
        attributes[f"gen_ai.usage.{name}"] = record.prompt_tokens
    for name in ("completion_tokens", "output_tokens"):
        attributes[f"gen_ai.usage.{name}"] = record.completion_tokens
    if record.options.sampling is not None:
        attributes["gen_ai.request.temperature"] = record.options.sampling.temperature
        attributes["gen_ai.request.top_p"] = record.options.sampling.top_p
    return attributes | _latencies(record.times) | _speculation(record.tallies, record.verifier)


def _identity(id: str, path: str) -> dict[str, Any]:
    """The attributes of every span."""
    return {
        "gen_ai.operation.name": "chat" if any(word in path for word in CHATS) else "text_completion",
        "gen_ai.system": "outrider",
        "gen_ai.request.id": id,
    }


def _latencies(times: Sequence[Times]) -> dict[str, float]:
    """Where the time of a request went, in seconds; what did not happen is left out."""
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


def _speculation(tallies: Sequence[OutputTally], verifier: str) -> dict[str, Any]:
    """How a request was drafted; nothing where nothing was."""
    drafted = [count for tally in tallies for count in tally.drafted]
    drafts = sum(count > 0 for count in drafted)
    if not drafts:
        return {}
    accepted = sum(sum(tally.accepted) for tally in tallies)
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
