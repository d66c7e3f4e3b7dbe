"""Commands with --url, and servers that are none, that refuse the key, or that end in the middle."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.cli.runs import run

COMMANDS = {
    "generate": ("--prompt", "a", "--max-new-tokens", "4"),
    "chat": ("--max-new-tokens", "4"),
    "bench": ("--num-prompts", "1", "--max-new-tokens", "4"),
    "prove": ("--num-draws", "0"),
}
CARDS = {"data": [{"id": "m", "max_model_len": 512}]}
CHUNK = {"choices": [{"index": 0, "text": "a", "delta": {"content": "a"}}]}


class Strange(BaseHTTPRequestHandler):
    """Answers in the way that the first part of the path names."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self._answer()

    def _answer(self) -> None:
        way, path = self.path.split("/", 2)[1:]
        if way == "page":
            self._send(200, b"<html>a page</html>", "text/html")
        elif way == "list":
            self._send(200, b"[1, 2]")
        elif way == "cards":
            self._send(200, json.dumps({"data": [{"name": "m"}]}).encode())
        elif way == "key":
            self._send(401, b'{"error": {"message": "the key is wrong"}}')
        elif path == "v1/models":
            self._send(200, json.dumps(CARDS).encode())
        elif path == "tokenize":
            self._send(200, b'{"tokens": [1, 2, 3]}')
        elif way == "fields":
            self._send(200, b'{"choices": [{"index": 0}]}')
        else:
            self._cut()

    def _send(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _cut(self) -> None:
        """Begin an answer, and close the connection."""
        event = f"data: {json.dumps(CHUNK)}\n\n".encode()
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self.wfile.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture(scope="module")
def strange() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Strange) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("way", "sentence"),
    [
        ("page", "the server sent no JSON"),
        ("list", "is it a server with OpenAI's API?"),
        ("cards", "is it a server with OpenAI's API?"),
        ("key", "answered 401: the key is wrong"),
        ("fields", ""),
        ("cut", ""),
    ],
)
def test_a_strange_server_gets_a_sentence(monkeypatch, capsys, strange, command, way, sentence):
    said = iter(["Hello."])
    monkeypatch.setattr("builtins.input", lambda: next(said, "/quit"))
    status, _, err = run(monkeypatch, capsys, command, "--url", f"{strange}/{way}", *COMMANDS[command])
    lines = [line for line in err.splitlines() if line.strip()]
    assert status in (1, 2), err
    assert len([line for line in lines if line.startswith("error: ")]) == 1, err
    assert sentence in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_port_without_a_server_gets_a_sentence(monkeypatch, capsys, command):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        status, _, err = run(monkeypatch, capsys, command, "--url", url, *COMMANDS[command])
    assert status == 2
    assert "see whether a server runs there" in err
    assert "Traceback" not in err
