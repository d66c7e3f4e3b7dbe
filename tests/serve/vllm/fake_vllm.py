"""A fake of vLLM's server: the routes and the counters that Outrider uses, and no model. It is run as vLLM's module is.

It says the last tokens of the prompt backwards, as streams alone. What it does otherwise its flags or a seed ask for.
"""

import argparse
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HISTOGRAM = [1, 0, 1]
"""Of each answer: a draft of two tokens of which none was accepted, and one of which both were."""


class State:
    """What it counts, and how far an update of weights is."""

    def __init__(self) -> None:
        self.requests = 0
        self.steps: list[Any] = []
        self.updating = False


STATE = State()


class Handler(BaseHTTPRequestHandler):
    """Answers as vLLM does."""

    protocol_version = "HTTP/1.1"
    arguments: argparse.Namespace

    def log_message(self, *given: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        if self.path == "/health":
            self.say(200, None)
        elif self.path == "/v1/models":
            card = {"id": self.arguments.served_model_name[0], "object": "model", "owned_by": "vllm"}
            self.say(200, {"object": "list", "data": [card | {"max_model_len": 64, "root": "t"}]})
        elif self.path == "/version":
            self.say(200, {"version": "0.0.fake"})
        elif self.path == "/metrics":
            self.text(counters())
        elif self.path == "/seen":
            self.say(200, {"steps": STATE.steps, "environment": dict(os.environ), "arguments": sys.argv[1:]})
        else:
            self.say(404, {"error": {"message": "Not Found"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or "{}")
        route = self.path.partition("?")[0]
        if route in ("/v1/completions", "/v1/chat/completions"):
            self.complete(body)
        elif route == "/tokenize":
            text = body.get("prompt") or body["messages"][-1]["content"]
            tokens = [ord(letter) for letter in text[:20]]
            self.say(200, {"count": len(tokens), "max_model_len": 64, "tokens": tokens})
        elif os.environ.get("VLLM_SERVER_DEV_MODE") == "1":
            self.weights(route, body)
        else:
            self.say(404, {"error": {"message": "Not Found"}})

    def weights(self, route: str, body: dict[str, Any]) -> None:
        """The routes of weights, in vLLM's order."""
        STATE.steps.append(self.path.removeprefix("/"))
        if route == "/start_draft_weight_update":
            if STATE.updating:
                self.say(500, {"error": {"message": "start_weight_update called while a weight update is active"}})
                return
            STATE.updating = True
        if route == "/update_weights":
            with open(body["update_info"]["path"], "rb") as file:
                content = file.read()
            STATE.steps.append(len(content))
            if content.startswith(b"bad"):
                self.say(500, {"error": {"message": "no parameter named lm_head.weight; see https://example.org/x"}})
                return
        if route == "/finish_weight_update":
            STATE.updating = False
        self.say(200, {"message": "done"})

    def complete(self, body: dict[str, Any]) -> None:
        """Continue a prompt or a conversation, as a stream."""
        key = os.environ.get("VLLM_API_KEY")
        if key is not None and self.headers["authorization"] != f"Bearer {key}":
            self.say(401, {"error": {"message": "Unauthorized"}})
            return
        STATE.requests += 1
        prompt = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        tokens = prompt if isinstance(prompt, list) else [ord(letter) for letter in prompt]
        said = tokens[::-1][:4]
        own = {"acceptance_histogram": HISTOGRAM, "num_draft_tokens": 4, "num_spec_steps": 2}
        about = {
            "usage": {"prompt_tokens": len(tokens), "completion_tokens": len(said)},
            "metrics": {"time_to_first_token_ms": 1.0, "generation_time_ms": 3.0, "speculative_decoding": own},
        }
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for text, ids, reason in (("sa", said[:1], None), ("id", said[1:], "length")):
            written = {"delta": {"content": text}} if "messages" in body else {"text": text}
            self.chunk({"choices": [{"index": 0, "token_ids": ids, "finish_reason": reason} | written]})
            if body.get("seed") == 2:
                # It dies in the middle of an answer.
                os._exit(7)
        self.chunk({"choices": []} | about)
        self.piece(b"data: [DONE]\n\n")
        self.piece(b"")

    def chunk(self, value: Any) -> None:
        self.piece(b"data: " + json.dumps(value).encode() + b"\n\n")

    def piece(self, content: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
        self.wfile.flush()

    def say(self, status: int, value: Any) -> None:
        content = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def text(self, value: str) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/plain")
        self.send_header("content-length", str(len(value)))
        self.end_headers()
        self.wfile.write(value.encode())


def counters() -> str:
    """The counters, in Prometheus' text."""
    n = STATE.requests
    counts = {"drafts": 2 * n, "draft_tokens": 4 * n, "accepted_tokens": 2 * n}
    lines = [
        f'vllm:spec_decode_num_{name}_total{{engine="0",model_name="m"}} {value}.0' for name, value in counts.items()
    ]
    series = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    lines += [f'{series}{{engine="0",model_name="m",position="{place}"}} {n}.0' for place in range(2)]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Serve until a signal comes."""
    parser = argparse.ArgumentParser(prog="vllm")
    parser.add_argument("command")
    parser.add_argument("target")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name", nargs="+", default=["fake"])
    Handler.arguments, others = parser.parse_known_args()
    if "--no-such" in others:
        print("(EngineCore pid=7) ERROR 11-24 23:00:00 [core.py:1] Traceback (most recent call last):", file=sys.stderr)
        print("(EngineCore pid=7) ERROR 11-24 23:00:00 [core.py:1] ValueError: no such layer", file=sys.stderr)
        print(
            "(APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above.", file=sys.stderr
        )
        sys.exit(1)
    ThreadingHTTPServer((Handler.arguments.host, Handler.arguments.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
