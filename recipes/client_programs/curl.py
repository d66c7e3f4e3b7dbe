"""curl: what the documentation shows, with headers, a stream, and a wrong body."""

import json

from recipes.client_programs.steps import CHAT, MODEL, command, must, told

QUIET = ("curl", "--silent", "--show-error", "--no-buffer")


def main(url: str) -> None:
    """Try it against a server."""
    first = command("curl", "--version").split()
    print(json.dumps({"package": "curl", "version": first[1]}), flush=True)
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}
    made = command(*QUIET, "--fail", f"{url}/v1/completions", "--json", json.dumps(body))
    text = json.loads(made)["choices"][0]["text"]
    must(text, "a completion has text", made)
    told("completion", text)
    lines = command(*QUIET, "--fail", f"{url}/v1/completions", "--json", json.dumps({**body, "stream": True})).split(
        "\n\n"
    )
    must(lines[-2] == "data: [DONE]", "a stream ends with [DONE]", lines[-2:])
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    streamed = "".join(piece["choices"][0]["text"] for piece in pieces)
    must(streamed == text, "a stream has the text of the completion", (streamed, text))
    told("stream", f"{len(pieces)} events")
    chat = {"model": MODEL, "messages": CHAT, "max_tokens": 16}
    answer = command(*QUIET, "--fail", f"{url}/v1/chat/completions", "--json", json.dumps(chat))
    must(json.loads(answer)["choices"][0]["message"]["content"], "a chat has text", answer)
    told("chat")
    wrong = command(*QUIET, "--write-out", "\n%{http_code} %{content_type}", f"{url}/v1/completions", "--json", "{")
    said, _, ended = wrong.rpartition("\n")
    must(ended == "400 application/json" and json.loads(said)["error"]["message"], "a wrong body gets a reason", wrong)
    told("a wrong body", json.loads(said)["error"]["message"])
    metrics = command(*QUIET, "--fail", f"{url}/metrics")
    must("vllm:spec_decode_num_drafts_total" in metrics, "metrics count drafts", metrics[:200])
    told("metrics")
