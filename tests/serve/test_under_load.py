"""Many requests at once: metrics only grow and add up, and an event costs the server few calls."""

import asyncio
import itertools
import json
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as families

import outrider
from outrider.serve.app import make_app
from outrider.serve.run.service import Service
from recipes.serve_clients import WRONG
from tests.serve.observe.test_exposition import HISTOGRAMS
from tests.serve.served import loaded

SERVE = str(Path(outrider.__file__).parent / "serve")
PROMPTS = ("Once upon a time", "One day, a boy named Tim", "The little dog", "She said: ")
GROWING = ("_total", "_count", "_bucket", "_sum")
ENDED = ("e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds")
ENDED += ("request_prompt_tokens", "request_generation_tokens")
"""Histograms with one value for each output that ended after it had got a slot."""


def numbers(client: httpx.Client) -> dict[tuple[str, str], float]:
    """All samples of counters and histograms."""
    found = {}
    for family in families(client.get("/metrics").text):
        for each in family.samples:
            if each.name.endswith(GROWING) and family.type != "gauge":
                found[each.name, json.dumps(each.labels, sort_keys=True)] = each.value
    return found


def grown(before: dict[tuple[str, str], float], after: dict[tuple[str, str], float], name: str) -> float:
    """By how much all series of a name have grown together."""
    return sum(value - before.get(key, 0) for key, value in after.items() if key[0] == name)


def test_metrics_are_monotone_and_count_each_finished_request_once(url: str, client: httpx.Client) -> None:
    def ask(i: int) -> int:
        body = {"prompt": PROMPTS[i % 4], "max_tokens": 1 + 2 * i, "ignore_eos": True, "n": 1 + i % 2, "stream": False}
        with httpx.Client(base_url=url, timeout=60) as own:
            return own.post("/v1/completions", json=body).json()["usage"]["completion_tokens"]

    samples = [numbers(client)]
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, i) for i in range(12)]
        samples += [numbers(client) for _ in as_completed(asked)]
    while client.get("/load").json()["server_load"]:
        time.sleep(0.01)
    samples.append(numbers(client))
    for earlier, later in itertools.pairwise(samples):
        shrunk = {key: (value, later.get(key)) for key, value in earlier.items() if later.get(key, -1.0) < value}
        assert shrunk == {}
    before, after = samples[0], samples[-1]
    outputs = sum(1 + i % 2 for i in range(12))
    assert grown(before, after, "vllm:request_success_total") == outputs
    for name in ENDED:
        assert name in HISTOGRAMS
        assert grown(before, after, f"vllm:{name}_count") == outputs, name
    assert grown(before, after, "vllm:time_to_first_token_seconds_count") == outputs
    assert grown(before, after, "vllm:request_params_n_count") == 12
    assert grown(before, after, "vllm:request_params_n_sum") == outputs
    tokens = sum(each.result() for each in asked)
    assert grown(before, after, "vllm:generation_tokens_total") == tokens
    assert grown(before, after, "vllm:request_generation_tokens_sum") == tokens
    steps = grown(before, after, "outrider:tokens_per_step_count")
    first = grown(before, after, "vllm:time_to_first_token_seconds_count")
    assert grown(before, after, "vllm:inter_token_latency_seconds_count") == steps - first
    # Finished requests of a bucket are those of all smaller ones too.
    for (name, labels), value in after.items():
        if name.endswith("_bucket"):
            rest = {key: each for key, each in json.loads(labels).items() if key != "le"}
            assert value <= after[name.replace("_bucket", "_count"), json.dumps(rest, sort_keys=True)]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_step_wakes_the_event_loop_once_and_an_event_takes_few_calls(path: str) -> None:
    engine, steps, streams = loaded(drafter="none"), [], 8
    engine.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    engine.between = lambda: steps.append(len(engine.running))
    service = Service(engine, names=("pair",))
    app = make_app(service)
    body: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 30, "stream": True}
    body |= {"prompt": PROMPTS[0]} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "One"}]}
    calls, wakes, writes = Counter[str](), [], []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SERVE):
            calls[frame.f_code.co_qualname] += 1

    async def ask() -> None:
        sent = False

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if sent:
                await asyncio.Event().wait()
            sent = True
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            writes.append(message.get("body", b""))

        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path}
        scope |= {"raw_path": path.encode(), "root_path": "", "scheme": "http", "query_string": b""}
        await app({**scope, "headers": [(b"content-type", b"application/json")]}, receive, send)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe

        def counting(callback: Any, *arguments: Any, **options: Any) -> Any:
            if threading.current_thread().name == "outrider-engine":
                wakes.append(callback)
            return wake(callback, *arguments, **options)

        loop.call_soon_threadsafe = counting  # type: ignore[method-assign]
        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(ask())

    service.start()
    sys.setprofile(note)
    try:
        asyncio.run(run())
    finally:
        sys.setprofile(None)
        service.close()
    events = [write for write in writes if write.startswith(b"data: {")]
    assert len(events) >= 25 * streams
    assert len(wakes) <= len(steps) + 2 * streams, (len(wakes), len(steps))
    # What a whole request takes is spread over its events.
    each = sum(calls.values()) / len(events)
    assert each <= CALLS, (each, [(name, round(count / len(events), 2)) for name, count in calls.most_common(40)])


CALLS = 34
"""Most calls of the server's own functions for an event, those of the whole request included."""


@pytest.mark.parametrize("name", sorted(WRONG))
def test_a_client_that_misbehaves_gets_no_error_of_the_server_and_leaves_nothing(
    name: str, url: str, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipes.serve_clients.PAUSE", 0.05)
    port, asked = int(url.rpartition(":")[2]), {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 8}

    async def run() -> list[str | None]:
        return await asyncio.gather(*[WRONG[name](port, asked, random.Random(seed)) for seed in range(2)])

    assert set(asyncio.run(asyncio.wait_for(run(), 60))) == {None}
    while client.get("/load").json()["server_load"]:
        time.sleep(0.01)
    assert client.post("/v1/completions", json=asked).status_code == 200
    assert client.get("/health").status_code == 200
