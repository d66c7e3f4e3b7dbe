"""Bodies of requests: what is no JSON, too deep, or of the wrong kind."""

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from outrider.serve.api.bodies import Body, ChatBody, CompletionBody, checked, read
from outrider.serve.errors import ServeError
from outrider.serve.limits import Limits


def error_of(value: object, model: type = CompletionBody) -> ServeError:
    with pytest.raises(ServeError) as found:
        checked(model, value)
    return found.value


def model_of(body: bytes) -> Body:
    """The model that a request with this body is read as."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    return asyncio.run(read(Request({"type": "http", "headers": []}, receive), Body, Limits(max_json_depth=64)))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"NaN",
        b'{"a": Infinity}',
        b"\xff",
        b'"\xff"',
        b'"\\ud800"',
        b"[" * 100_000,
        b"1" * 1_000_000,
        b"{} {}",
        b"[]",
    ],
)
def test_what_is_no_object_of_json_is_refused(body: bytes) -> None:
    with pytest.raises(ServeError) as found:
        model_of(body)
    assert (found.value.status, found.value.code) == (400, "invalid_json")


def test_depth_is_counted_exactly() -> None:
    assert model_of(b'{"a":' + b"[" * 63 + b"]" * 63 + b"}").model_extra
    assert model_of(b'{"a":' * 64 + b"1" + b"}" * 64).model_extra
    with pytest.raises(ServeError, match="more than 64 levels"):
        model_of(b'{"a":' + b"[" * 64 + b"]" * 64 + b"}")


def test_null_counts_as_not_given() -> None:
    body = checked(CompletionBody, {"prompt": "a", "n": None, "stop": None, "max_tokens": None, "logit_bias": None})
    assert (body.n, body.stop, body.max_tokens, body.logit_bias) == (1, [], None, {})


def test_unknown_keys_are_kept_and_ignored() -> None:
    assert checked(CompletionBody, {"prompt": "a", "zzz": {"b": 1}}).model_extra == {"zzz": {"b": 1}}


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt.1"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": "2"}, "n"),
        ({"prompt": "a", "n": 2.5}, "n"),
        ({"prompt": "a", "n": True}, "n"),
        ({"prompt": "a", "temperature": "1"}, "temperature"),
        ({"prompt": "a", "logit_bias": {"5": "x"}}, "logit_bias.5"),
        ({"prompt": "a", "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format.type"),
    ],
)
def test_a_wrong_field_is_named(value: object, param: str) -> None:
    error = error_of(value)
    assert error.status == 400
    assert (error.param or "").startswith(param.split(".")[0])
    assert param in (error.param or "") or param.split(".")[0] == error.param


def test_a_field_of_a_message_is_named_without_names_of_types() -> None:
    error = error_of({"messages": [{"role": "user", "content": "a"}, {"role": "king", "content": "b"}]}, ChatBody)
    assert error.param == "messages.1.role"


def test_an_answer_lists_at_most_ten_wrong_fields_and_short_values() -> None:
    error = error_of({"messages": [{"role": "x" * 10_000}] * 500}, ChatBody)
    assert len(error.message) <= 2000
    assert "and 490 more" in error.message or len(error.message) == 2000
