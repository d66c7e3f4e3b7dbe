"""A server of the llama.cpp family without an engine: beside its model lie recorded answers, by prompt.

With a lookup its answers lack their last token, as if drafts had changed them; at another temperature than 0 it answers
the same. It knows no suffix trees.
"""

import json
import os
import shlex
import sys
from argparse import ArgumentParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

MILLISECONDS = {"prompt_ms": 50.0, "predicted_ms": 100.0}


def wrapper(place: Path) -> Path:
    """A program that starts this file."""
    program = place / "llama-server"
    program.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, __file__])} "$@"\n')
    program.chmod(0o755)
    return program


class Answering(BaseHTTPRequestHandler):
    """One request."""

    answers: dict[str, list[int]]
    lookup = False
    drafts = False

    def do_GET(self) -> None:
        self.say(200, {"status": "ok"})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self.say(200, {"tokens": [int(word) for word in asked["content"].split()]})
            return
        recorded = self.answers.get(json.dumps(asked["prompt"]))
        if recorded is None:
            self.say(400, {"error": {"message": "the prompt is too long"}})
            return
        tokens = recorded[: len(recorded) - self.lookup][: asked["n_predict"]]
        # Its last draft reaches one token beyond what was asked.
        timings = MILLISECONDS | {"predicted_n": len(tokens) + self.drafts}
        if self.drafts:
            timings |= {"draft_n": 8, "draft_n_accepted": 2}
        likeliest = [{"id": tokens[0] + i, "logprob": -1.0 - i} for i in range(asked.get("n_probs", 0))]
        told = {"top_logprobs": likeliest}
        if self.path == "/completion":
            answer = {"tokens": tokens if asked["return_tokens"] else [], "timings": timings}
            self.say(200, answer | {"completion_probabilities": [told]})
            return
        ids = {"content": [told | {"id": token} for token in tokens]} if "logprobs" in asked else None
        text = " ".join(map(str, tokens))
        self.say(200, {"choices": [{"text": text, "logprobs": ids}], "timings": timings})

    def say(self, status: int, answer: object) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


if __name__ == "__main__":
    parser = ArgumentParser()
    for name in ("-m", "-md", "-t", "-np", "-c", "--cache-ram", "--spec-draft-n-max", "--draft-max"):
        parser.add_argument(name)
    parser.add_argument("--port", type=int)
    parser.add_argument("--spec-type", action="append", default=[])
    parser.add_argument("-rtr", action="store_true")
    given = parser.parse_args()
    if any(each.startswith("suffix") for each in given.spec_type):
        print("unknown speculative decoding type\nusage: llama-server\n\n  -o, --output FNAME", flush=True)
        sys.exit(1)
    Path("llama.log").write_text("a log, as ik_llama.cpp writes it where it is started")
    Answering.answers = json.loads(Path(given.m).with_suffix(".json").read_text())
    Answering.lookup, Answering.drafts = "ngram-simple" in given.spec_type, bool(given.spec_type or given.md)
    Path(given.m).with_suffix(".pid").write_text(str(os.getpid()))
    ThreadingHTTPServer(("127.0.0.1", given.port), Answering).serve_forever()
