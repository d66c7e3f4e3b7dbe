"""Reading streamed answers."""

import json
from typing import Any

import httpx


def chunks(client: httpx.Client, path: str, body: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    """The values of all events; the last event must be the end."""
    with client.stream("POST", path, json={**body, "stream": True}, **more) as answer:
        lines = [line for line in answer.iter_lines() if line and not line.startswith(":")]
        assert answer.status_code == 200, lines
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def post(client: httpx.Client, path: str, body: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The answer of a request that succeeds."""
    answer = client.post(path, json=body, **more)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found
