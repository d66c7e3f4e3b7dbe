"""What a client must not reach: files, other machines, code, and more of the server than its limits give."""

import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.cli.serve import ServeOptions, is_loopback
from outrider.core.inputs import InputError
from outrider.serve.limits import Limits
from tests.serve.served import loaded, serving

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
HOST = "outrider.invalid"
"""A machine that no request may reach."""
WATCHED: list[str] | None = None
"""What was opened and connected to while somebody looks."""


def _look(event: str, arguments: tuple[Any, ...]) -> None:
    if WATCHED is not None and event in (
        "open",
        "socket.connect",
        "socket.getaddrinfo",
        "os.listdir",
        "import",
        "exec",
    ):
        WATCHED.append(f"{event} {arguments}")


sys.addaudithook(_look)


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """What the process opens and connects to while a test runs."""
    global WATCHED
    WATCHED = []
    yield WATCHED
    WATCHED = None


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that nobody may read."""
    place = tmp_path_factory.mktemp("secret") / "secret-file.json"
    place.write_text('{"type": "string"}')
    return place


TIGHT = Limits(max_schema_bytes=200, max_schema_depth=4, max_outputs=3, header_seconds=0.2)


@pytest.fixture(scope="module")
def tight() -> Iterator[str]:
    """A server with small limits."""
    with serving(loaded(), limits=TIGHT) as url:
        yield url


def places(path: str) -> list[dict[str, Any]]:
    """Bodies that name a place wherever a name can stand."""
    text = {"prompt": path, "max_tokens": 2}
    user = {"role": "user", "content": path}
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": path}}]}
    schema = {"type": "json_schema", "json_schema": {"name": path, "schema": {"$ref": path}}}
    template = "{% include '" + path + "' %}{{ ''.__class__.__mro__ }}"
    bodies = [
        text,
        {**text, "prompt": "a", "model": path},
        {**text, "prompt": "a", "user": path, "request_id": path, "session_id": path, "lora_path": path},
        {**text, "prompt": "a", "stop": path, "bad_words": [path]},
        {**text, "prompt": "a", "speculation": {"drafter": f"model:path={path}"}},
        {**text, "prompt": "a", "speculation": {"drafter": path}},
        {**text, "prompt": "a", "response_format": schema},
        {**text, "prompt": "a", "structured_outputs": {"json": {"$ref": path}}},
        {**text, "prompt": "a", "structured_outputs": {"grammar": f'%import "{path}"'}},
        {**text, "prompt": "a", "structured_outputs": {"regex": "a"}, "guided_decoding_backend": path},
    ]
    messages = [
        {"messages": [user]},
        {"messages": [image]},
        {"messages": [{**user, "content": "a"}], "chat_template": template},
        {"messages": [{**user, "content": "a"}], "chat_template_kwargs": {"path": path, "chat_template": template}},
        {"messages": [{**user, "content": "a"}], "documents": [{"title": path, "text": path}]},
        {"messages": [{**user, "content": "a"}], "tools": [{"type": "mcp", "server_url": path}]},
    ]
    return [{"at": COMPLETIONS, **each} for each in bodies] + [
        {"at": CHATS, "max_tokens": 2, **each} for each in messages
    ]


@pytest.mark.parametrize("form", ["{secret}", "file://{secret}", "http://{host}/{secret}"])
def test_no_place_of_a_request_is_opened_or_connected_to(
    client: httpx.Client, opened: list[str], secret: Path, form: str
) -> None:
    path = form.format(secret=secret, host=HOST)
    for body in places(path):
        answer = client.post(body.pop("at"), json=body, headers={"x-session-id": path, "x-request-id": path})
        assert answer.status_code in (200, 400, 404), answer.text
        assert "Traceback" not in answer.text
    for route in (
        f"/page/{path}",
        "/page/..%2f..%2fpyproject.toml",
        f"/v1/models/{path}",
        f"/tokenizer_info?file={path}",
    ):
        assert client.get(route).status_code in (200, 404)
    # The client's own connections are to the loopback address.
    assert [each for each in opened if "secret-file" in each or HOST in each] == []


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"structured_outputs": {"regex": "a" * 201}}, "is longer than 200 bytes"),
        ({"structured_outputs": {"json": {"enum": ["a" * 200]}}}, "is longer than 200 bytes"),
        ({"structured_outputs": {"choice": ["a" * 150, "b" * 150]}}, "is longer than 200 bytes"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": {"b": {"c": {"d": {}}}}}}}},
            "deep",
        ),
        ({"n": 4}, "n must be"),
        ({"prompt": "a " * 3000}, "context"),
    ],
    ids=str,
)
def test_more_than_a_limit_is_refused_by_name(tight: str, more: dict[str, Any], words: str) -> None:
    answer = httpx.post(f"{tight}{COMPLETIONS}", json={"prompt": "a", "max_tokens": 2, **more}, timeout=60)
    assert (answer.status_code, words in answer.json()["error"]["message"]) == (400, True), answer.text


def test_only_this_machine_is_served_unless_somebody_says_otherwise() -> None:
    assert is_loopback(ServeOptions().host)
    assert (ServeOptions().allow_no_key, ServeOptions().admin_key, ServeOptions().cors_origin) == (False, None, ())
    assert Limits().max_body_bytes <= 2**23
    with pytest.raises(InputError, match="api_key must not be empty"):
        ServeOptions(api_key=("",))


@pytest.mark.parametrize("ends", [False, True])
def test_headers_that_are_too_long_end_the_connection(url: str, client: httpx.Client, ends: bool) -> None:
    end = b"\r\n\r\n" if ends else b""
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=30) as wire:
        wire.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\nx-a: " + b"a" * 70_000 + end)
        answer = wire.recv(1000)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert client.get("/health", headers={"x-a": "a" * 60_000}).status_code == 200
    # One connection may carry many requests.
    assert [client.get("/health", headers={"x-a": "a" * 30_000}).status_code for _ in range(3)] == [200] * 3


def test_headers_that_do_not_end_in_time_end_the_connection(tight: str) -> None:
    for said in (b"", b"GET /health HTTP/1.1\r\nhost: a\r\nx-a: "):
        with socket.create_connection(("127.0.0.1", int(tight.rpartition(":")[2])), timeout=30) as wire:
            wire.sendall(said)
            assert wire.recv(1000).startswith(b"HTTP/1.1 400 ")
    # A request that was sent in time is answered, however long that takes, and so is the next one on its connection.
    body = {"prompt": "Once", "max_tokens": 60, "ignore_eos": True, "speculation": False}
    with httpx.Client(base_url=tight, timeout=60) as client:
        assert [client.post(COMPLETIONS, json=body).status_code for _ in range(2)] == [200, 200]
