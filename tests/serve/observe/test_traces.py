"""What a server tells of its requests elsewhere: spans and lines of the log, which hold no text unless asked for."""

import contextlib
import io
import json
import logging
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from outrider.cli.serve import ServeOptions
from outrider.core.inputs import InputError
from outrider.serve.limits import Limits
from outrider.serve.observe.logs import LOGGERS, use_json
from outrider.serve.observe.traces import Traces, _is_installed
from outrider.serve.settings import HttpSettings
from tests.serve.served import NAME, loaded, serving

PROMPT = "Once upon a time there was a secret"
TALK = [{"role": "user", "content": PROMPT}]
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def exporter() -> Any:
    """What the server's spans go to; None where OpenTelemetry's SDK is not installed."""
    if not _is_installed("opentelemetry.sdk"):
        return None
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    return InMemorySpanExporter()


@contextlib.contextmanager
def traced(exporter: Any, *, content: bool = False) -> Iterator[Traces | None]:
    """Traces that go to an exporter; None where OpenTelemetry's SDK is not installed."""
    if exporter is None:
        yield None
        return
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield Traces(provider, content=content)


@pytest.fixture(scope="module")
def url(exporter: Any) -> Iterator[str]:
    with traced(exporter) as traces, serving(loaded(length="fixed:3"), traces=traces) as found:
        yield found


@pytest.fixture
def spans(exporter: Any) -> Any:
    """The spans of a test."""
    if exporter is None:
        pytest.skip("needs opentelemetry-sdk")
    exporter.clear()
    return exporter


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as found:
        yield found


@contextlib.contextmanager
def logged() -> Iterator[io.StringIO]:
    """The log as JSON, while the block runs."""
    written = io.StringIO()
    before = [(each, each.handlers, each.propagate, each.level) for each in map(logging.getLogger, LOGGERS)]
    with contextlib.redirect_stderr(written):
        use_json()
    try:
        yield written
    finally:
        for logger, handlers, propagate, level in before:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)


def requests_of(written: io.StringIO) -> list[dict]:
    """The lines of requests."""
    return [line for line in map(json.loads, written.getvalue().splitlines()) if line["message"] == "request"]


def test_each_request_has_a_span_with_vllms_attributes_and_no_text(client: httpx.Client, spans) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "n": 2}
    answer = client.post("/v1/completions", json=body, headers={"traceparent": PARENT, "x-request-id": "mine"})
    usage = answer.json()["usage"]
    [span] = spans.get_finished_spans()
    assert (span.name, span.kind.name, span.status.status_code.name) == ("llm_request", "SERVER", "UNSET")
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
    found = dict(span.attributes)
    expected = {
        "operation.name": "text_completion",
        "system": "outrider",
        "request.id": "mine",
        "request.n": 2,
        "request.max_tokens": 12,
        "request.temperature": 0.0,
        "request.top_p": 1.0,
        "response.model": NAME,
        "response.finish_reasons": ("length", "length"),
        "usage.num_sequences": 2,
        "usage.prompt_tokens": usage["prompt_tokens"],
        "usage.input_tokens": usage["prompt_tokens"],
        "usage.completion_tokens": 24,
        "usage.output_tokens": 24,
    }
    assert {name: found[f"gen_ai.{name}"] for name in expected} == expected
    latency = {name.rpartition(".")[2]: value for name, value in found.items() if ".latency." in name}
    assert latency["e2e"] == pytest.approx(latency["time_in_queue"] + latency["time_in_model_inference"])
    assert latency["time_in_model_inference"] >= latency["time_in_model_prefill"] > 0
    assert latency["time_in_model_decode"] > 0
    assert span.end_time - span.start_time >= 1e9 * latency["e2e"]
    drafted = found["outrider.speculation.draft_tokens"]
    assert drafted >= found["outrider.speculation.accepted_tokens"] > 0
    assert found["outrider.speculation.mean_acceptance_length"] > 1
    assert "secret" not in str(found)
    assert not span.events


def test_spans_of_streams_end_with_them_and_tell_of_failures(client: httpx.Client, spans) -> None:
    body = {"prompt": PROMPT, "ignore_eos": True}
    with client.stream("POST", "/v1/completions", json={**body, "max_tokens": 400, "stream": True}) as answer:
        next(answer.iter_lines())
    client.post("/v1/completions", json={"prompt": []})
    client.post("/v1/completions", json={**body, "max_tokens": 2, "speculation": False})
    found = {}
    while len(found) < 3:
        # A client that left is noticed a little later.
        found = {span.attributes.get("gen_ai.response.finish_reasons"): span for span in spans.get_finished_spans()}
    assert set(found) == {("abort",), ("length",), None}
    assert "outrider.speculation.verifier" not in found["length",].attributes


@pytest.mark.parametrize(
    ("route", "body", "status", "code"),
    [
        ("/v1/completions", {"prompt": PROMPT, "n": 1000}, 400, "invalid_value"),
        ("/v1/completions", {"prompt": PROMPT, "suffix": "secret"}, 400, "unsupported_parameter"),
        (
            "/v1/chat/completions",
            {"messages": TALK, "model": "secret"},
            404,
            "model_not_found",
        ),
        ("/v1/responses", {"input": PROMPT, "model": "secret"}, 404, "model_not_found"),
        ("/v1/messages", {"messages": PROMPT, "max_tokens": 2}, 400, "invalid_value"),
    ],
)
def test_a_request_that_is_refused_has_a_span_with_its_status_and_no_text(
    client: httpx.Client, spans, route: str, body: dict, status: int, code: str
) -> None:
    answer = client.post(route, json=body, headers={"traceparent": PARENT, "x-request-id": "mine"})
    assert answer.status_code == status, answer.text
    while not spans.get_finished_spans():
        # A span is made after the answer.
        pass
    [span] = spans.get_finished_spans()
    assert (span.name, span.kind.name, span.status.status_code.name) == ("llm_request", "SERVER", "ERROR")
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    found = dict(span.attributes)
    operation = "text_completion" if route == "/v1/completions" else "chat"
    assert found == {
        "gen_ai.operation.name": operation,
        "gen_ai.system": "outrider",
        "gen_ai.request.id": "mine",
        "http.response.status_code": status,
        "error.type": code,
    }


def test_refusals_without_a_key_or_a_place_have_spans_and_other_routes_have_none(exporter: Any) -> None:
    if exporter is None:
        pytest.skip("needs opentelemetry-sdk")
    exporter.clear()
    settings, limits = HttpSettings(keys=("key",)), Limits(max_queue_tokens=0, max_queue=0)
    with traced(exporter) as traces, serving(loaded(), settings, limits, traces=traces) as url:
        right = {"authorization": "Bearer key"}
        assert httpx.post(f"{url}/v1/completions", json={"prompt": PROMPT}).status_code == 401
        assert httpx.get(f"{url}/v1/completions", headers=right).status_code == 405
        body = {"prompt": ["a"] * 20, "max_tokens": 2}
        assert httpx.post(f"{url}/v1/completions", json=body, headers=right, timeout=60).status_code == 429
        assert httpx.post(f"{url}/tokenize", json={}).status_code == 400
        assert httpx.get(f"{url}/v1/models").status_code == 401
    told = [
        (span.attributes["http.response.status_code"], span.attributes["error.type"])
        for span in exporter.get_finished_spans()
    ]
    assert told == [(401, "invalid_api_key"), (405, "not_found"), (429, "queue_full")]


def test_spans_hold_prompts_and_outputs_if_asked_for(exporter: Any) -> None:
    if exporter is None:
        pytest.skip("needs opentelemetry-sdk")
    exporter.clear()
    engine = loaded()
    with traced(exporter, content=True) as traces, serving(engine, traces=traces) as url:
        body = {"prompt": [PROMPT, "a"], "max_tokens": 4, "temperature": 0}
        choices = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"]
        while not exporter.get_finished_spans():
            pass
    [span] = exporter.get_finished_spans()
    told = [(event.name, dict(event.attributes)) for event in span.events]
    prompts = [engine.tokenizer.decode(engine.encode(text)) for text in (PROMPT, "a")]
    assert told == [("gen_ai.content.prompt", {"gen_ai.prompt": text}) for text in prompts] + [
        ("gen_ai.content.completion", {"gen_ai.completion": choice["text"]}) for choice in choices
    ]
    assert "secret" not in str(dict(span.attributes))


def test_texts_of_spans_need_an_endpoint() -> None:
    assert not ServeOptions().otel_content
    with pytest.raises(InputError, match="--otel-content says what spans hold; give --otlp-traces-endpoint too"):
        ServeOptions(otel_content=True)


def test_lines_of_the_log_count_and_quote_nothing(url: str) -> None:
    with logged() as written, httpx.Client(base_url=url, timeout=60) as client:
        body = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}
        client.post("/v1/completions", json=body, headers={"x-request-id": "right"})
        client.post("/v1/completions", json={"prompt": [], "user": "secret"}, headers={"x-request-id": "wrong"})
        # A request of another test may end in between.
        while len(lines := {line["id"]: line for line in requests_of(written)}) < 2 or "wrong" not in lines:
            time.sleep(0.01)
    [one] = [line for name, line in lines.items() if name.endswith("right")]
    wrong = lines["wrong"]
    assert (one["route"], one["status"], one["level"]) == ("/v1/completions", 200, "info")
    assert one["completion_tokens"] == 4
    assert one["finish_reasons"] == ["length"]
    assert one["seconds"] > 0
    assert (wrong["id"], wrong["status"]) == ("wrong", 400)
    assert "secret" not in written.getvalue()


def test_prompts_and_outputs_are_logged_if_asked_for() -> None:
    engine = loaded()
    with logged() as written, serving(engine, HttpSettings(log_text=True)) as url:
        body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
        text = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
        while not requests_of(written):
            time.sleep(0.01)
    [line] = requests_of(written)
    assert line["prompts"] == [engine.tokenizer.decode(engine.encode(PROMPT))]
    assert line["outputs"] == [text]


def test_an_error_of_the_log_is_one_line_too() -> None:
    with logged() as written:
        try:
            raise RuntimeError("no")
        except RuntimeError:
            logging.getLogger("outrider.serve").exception("request %s failed", "a")
    [line] = map(json.loads, written.getvalue().splitlines())
    assert (line["level"], line["message"]) == ("error", "request a failed")
    assert "RuntimeError: no" in line["exception"]


def test_traces_need_a_url_and_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="otlp_traces_endpoint must begin with http:// or https://, got 'localhost'"):
        Traces.to("localhost")
    monkeypatch.setattr("outrider.serve.observe.traces._is_installed", lambda library: False)
    with pytest.raises(InputError, match=r"--otlp-traces-endpoint needs opentelemetry.sdk; .*outrider\[otel\]"):
        Traces.to("http://127.0.0.1:4318/v1/traces")
