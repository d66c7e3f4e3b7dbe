"""What clients should not send."""

import json
import random
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from outrider.serve.api.bodies import ChatBody, CompletionBody
from outrider.serve.limits import Limits
from tests.serve.served import loaded, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SMALL: dict[str, Any] = {"prompt": "One", "max_tokens": 1}
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"prompt": "a", "x": ' + b"[" * 70 + b"]" * 70 + b"}",
        b'{"prompt": "a", "seed": ' + b"1" * 1_000_000 + b"}",
    ],
    ids=range(12),
)
def test_no_json_object_is_a_400(client: httpx.Client, path: str, body: bytes) -> None:
    answer = client.post(path, content=body, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (400, "invalid_request_error", "invalid_json")


def test_another_media_type_is_a_415(client: httpx.Client) -> None:
    answer = client.post(COMPLETIONS, data={"prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_long_is_a_413(client: httpx.Client, chunked: bool) -> None:
    body = b'{"prompt": "' + b"a" * (8 * 2**20) + b'"}'

    def pieces() -> Iterator[bytes]:
        for i in range(0, len(body), 2**16):
            yield body[i : i + 2**16]

    headers = {"content-type": "application/json"}
    try:
        answer = client.post(COMPLETIONS, content=pieces() if chunked else body, headers=headers)
    except httpx.WriteError:
        pytest.skip("the server closed the connection while the body was on its way")
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


def test_a_body_at_the_limit_is_read(client: httpx.Client) -> None:
    head, tail = b'{"max_tokens": 0, "user": "', b'", "prompt": "a"}'
    body = head + b"a" * (8 * 2**20 - len(head) - len(tail)) + tail
    answer = client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"n": 17}, "n"),
        ({"n": 10**30}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 257}, "stop"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e999}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"priority": 1}, "priority"),
        ({"guided_json": {}}, "guided_json"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_embeds": "x"}, "prompt_embeds"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, None),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a(b"}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "structured_outputs"),
        ({"speculation": {"enabled": 1}}, "speculation.enabled"),
        ({"speculation": {"max_tokens": -1}}, "speculation.max_tokens"),
        ({"speculation": {"drafter": "nobody"}}, "speculation.drafter"),
        ({"speculation": {"verifier": "typical"}}, "speculation.verifier"),
        ({"speculation": {"policy": "fixed"}}, "speculation.policy"),
        ({"disable_spec_decode": 1}, "disable_spec_decode"),
        ({"speculative.n_max": -1}, None),
    ],
    ids=str,
)
def test_a_field_that_cannot_be_followed_is_named(
    client: httpx.Client, more: dict[str, Any], param: str | None
) -> None:
    # Not `json=`: infinity must go on its way.
    body = json.dumps({**SMALL, **more}).replace("Infinity", "1e999")
    answer = client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] is not None, error
        assert error["param"].startswith(param), error


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages.0.role"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"tools": []}, "tools"),
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [TOOL] * 129, "tool_choice": "required"}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "any", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"functions": [{}]}, "functions"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"logprobs": 3}, "logprobs"),
    ],
    ids=str,
)
def test_a_field_of_a_chat_that_cannot_be_followed_is_named(
    client: httpx.Client, more: dict[str, Any], param: str
) -> None:
    answer = client.post(CHAT, json={**TALK, **more})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param), answer.text


def test_nulls_count_as_not_given(client: httpx.Client) -> None:
    names = [
        "n",
        "stop",
        "logprobs",
        "top_logprobs",
        "tools",
        "tool_choice",
        "response_format",
        "stream_options",
        "seed",
    ]
    names += ["temperature", "top_p", "max_completion_tokens", "logit_bias", "speculation", "user", "model", "stream"]
    assert client.post(CHAT, json={**TALK, **dict.fromkeys(names)}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "shape"),
    [
        ("/v1/responses", {"input": "a", "max_output_tokens": 2}, "openai"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}, "anthropic"),
        (CHAT, TALK, "openai"),
    ],
)
def test_keys_that_change_the_output_are_refused_on_every_route(
    client: httpx.Client, path: str, body: dict[str, Any], shape: str
) -> None:
    for key, value in (("guided_json", {}), ("use_beam_search", True), ("speculation", {"max_token": 1})):
        answer = client.post(path, json={**body, key: value})
        assert answer.status_code == 400, answer.text
        assert key in answer.json()["error"]["message"]
        assert ("param" in answer.json()["error"]) == (shape == "openai")
    for wrong in (client.get(path), client.post(f"{path}/none/such", json={})):
        assert wrong.status_code in (404, 405)
        assert (wrong.json().get("type") == "error") == (shape == "anthropic")


def test_other_names_for_drafting_nothing_are_read(client: httpx.Client) -> None:
    for key, value in (("disable_spec_decode", True), ("speculative", False), ("speculative.n_max", 0)):
        found = client.post(COMPLETIONS, json={**SMALL, key: value}).json()
        assert found["metrics"]["speculative_decoding"] is None, key


def test_unknown_keys_are_ignored(client: httpx.Client) -> None:
    assert client.post(CHAT, json={**TALK, "cache_prompt": True, "metadata": {"a": [1]}}).status_code == 200


def test_a_full_queue_is_a_429_with_a_time() -> None:
    with serving(loaded(), limits=Limits(max_queue=0)) as url:
        body = {**SMALL, "n": 16}
        answer = httpx.post(f"{url}{COMPLETIONS}", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
        answer = httpx.post(f"{url}{COMPLETIONS}", json={**body, "stream": True})
        assert answer.status_code == 429


@pytest.mark.parametrize("streams", [False, True])
def test_a_deadline_is_a_408(streams: bool) -> None:
    with serving(loaded(), limits=Limits(request_timeout=0.0)) as url:
        body = {"prompt": "One", "max_tokens": 500, "ignore_eos": True, "stream": streams}
        answer = httpx.post(f"{url}{COMPLETIONS}", json=body, timeout=30)
        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "request_timeout")


def test_a_client_that_leaves_frees_its_place(url: str, client: httpx.Client) -> None:
    body = {"prompt": "One", "max_tokens": 900, "ignore_eos": True}
    for streams in (True, False):
        address = urlsplit(url)
        content = json.dumps({**body, "stream": streams}).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        with socket.create_connection((address.hostname, address.port)) as wire:
            wire.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            while not client.get("/load").json()["server_load"]:
                time.sleep(0.01)
        for _ in range(500):
            if client.get("/load").json() == {"server_load": 0}:
                break
        assert client.get("/load").json() == {"server_load": 0}


WORDS = ("auto", "required", "none", "json_object", "user", "low", "a|b", "{", "", "é\u2028")
NAMES = ("type", "json", "regex", "schema", "function", "name", "5")


def value(dice: random.Random, depth: int = 0) -> Any:
    """Any JSON."""
    match dice.randrange(8 if depth < 3 else 6):
        case 0:
            return None
        case 1:
            return dice.random() < 0.5
        case 2:
            return dice.randint(-5, 40)
        case 3:
            return dice.choice((-(2**70), -1, 2**31, 2**64, 10**30))
        case 4:
            return dice.uniform(-3, 3)
        case 5:
            return dice.choice(WORDS)
        case 6:
            return [value(dice, depth + 1) for _ in range(dice.randrange(4))]
        case _:
            return {dice.choice(NAMES): value(dice, depth + 1) for _ in range(dice.randrange(4))}


KEYS = sorted({*CompletionBody.model_fields, *ChatBody.model_fields} - {"prompt", "messages", "max_tokens"})
KEYS = [key for key in KEYS if key not in ("max_completion_tokens", "n", "ignore_eos", "min_tokens")]


@pytest.mark.parametrize("seed", range(60))
def test_no_field_makes_the_server_fail(url: str, seed: int) -> None:
    dice = random.Random(seed)
    path = dice.choice((COMPLETIONS, CHAT))
    more = {key: value(dice) for key in dice.sample(KEYS, dice.randrange(1, 5))}
    body = {**(SMALL if path == COMPLETIONS else TALK), "max_tokens": 2, **more}
    answer = httpx.post(f"{url}{path}", json=body, timeout=60)
    assert answer.status_code in (200, 400, 404), (body, answer.text)
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_stream_that_is_cut_off_says_why() -> None:
    with serving(loaded(), limits=Limits(request_timeout=3.0)) as url:
        body = {"prompt": "One", "max_tokens": 1000, "ignore_eos": True, "stream": True, "n": 16}
        with httpx.stream("POST", f"{url}{COMPLETIONS}", json=body, timeout=60) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert answer.status_code == 200
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2][6:])["error"]["code"] == "request_timeout"
        assert "choices" in json.loads(lines[0][6:])
