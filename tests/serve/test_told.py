"""What a server tells of its requests elsewhere: spans for OpenTelemetry and lines of the log, without any text."""

import contextlib
import io
import json
import logging
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from outrider.core.inputs import InputError
from outrider.serve.logs import LOGGERS, use_json
from outrider.serve.settings import Settings
from outrider.serve.traces import Traces, _is_installed
from tests.serve.served import NAME, loaded, serving

PROMPT = "Once upon a time there was a secret"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def exporter() -> Any:
    """What the server's spans go to; None where OpenTelemetry's SDK is not installed."""
    if not _is_installed("opentelemetry.sdk"):
        return None
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def url(exporter: Any) -> Iterator[str]:
    if exporter is None:
        with serving(loaded(length="fixed:3")) as found:
            yield found
        return
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with serving(loaded(length="fixed:3"), traces=Traces(provider)) as found:
        yield found
    provider.shutdown()


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


def test_spans_of_streams_end_with_them_and_tell_of_failures(client: httpx.Client, spans) -> None:
    body = {"prompt": PROMPT, "ignore_eos": True}
    with client.stream("POST", "/v1/completions", json={**body, "max_tokens": 400, "stream": True}) as answer:
        next(answer.iter_lines())
    client.post("/v1/completions", json={"prompt": []})
    client.post("/v1/completions", json={**body, "max_tokens": 2, "speculation": False})
    found = {}
    while len(found) < 2:
        # A client that left is noticed a little later.
        found = {span.attributes["gen_ai.response.finish_reasons"]: span for span in spans.get_finished_spans()}
    assert set(found) == {("abort",), ("length",)}
    assert "outrider.speculation.verifier" not in found["length",].attributes


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
    with logged() as written, serving(engine, Settings(log_text=True)) as url:
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
    monkeypatch.setattr("outrider.serve.traces._is_installed", lambda library: False)
    with pytest.raises(InputError, match=r"--otlp-traces-endpoint needs opentelemetry.sdk; .*outrider\[otel\]"):
        Traces.to("http://127.0.0.1:4318/v1/traces")
