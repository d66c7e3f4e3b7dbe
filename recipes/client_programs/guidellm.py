"""GuideLLM: a short load of streamed chats and one of completions, whose report it reads."""

import json
import tempfile
from pathlib import Path

from recipes.client_programs.steps import MODEL, command, must, told, uses

REQUESTS = 12


def main(url: str, target: str) -> None:
    """Try it against a server of the weights of `target`."""
    uses("guidellm")
    for kind in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        with tempfile.TemporaryDirectory() as made:
            report = Path(made) / "report.json"
            where = ("--backend", f"kind=openai_http,target={url},model={MODEL},request_format={kind}")
            load = ("--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={REQUESTS}")
            data = ("--data", "kind=synthetic_text,prompt_tokens=48,output_tokens=24")
            reader = ("--tokenizer", f"kind=huggingface_auto,model={target}")
            written = ("--output", f"kind=json,path={report}", "--disable-progress")
            command("guidellm", "run", *where, *load, *data, *reader, *written, HF_HUB_OFFLINE="1")
            [run] = json.loads(report.read_text())["benchmarks"]
        totals = run["metrics"]["request_totals"]
        must(totals["successful"] == REQUESTS and not totals["errored"], f"{kind}: all requests succeed", totals)
        first = run["metrics"]["time_to_first_token_ms"]["successful"]["count"]
        must(first == REQUESTS, f"{kind}: every stream has a first token", first)
        told(f"{kind}, streamed, 4 at once", f"{totals['successful']} of {REQUESTS} requests")
