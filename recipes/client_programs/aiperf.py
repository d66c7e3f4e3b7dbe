"""AIPerf: a short load of streamed chats and one of completions; its report has a section on speculative decoding."""

import json
import tempfile
from pathlib import Path

from recipes.client_programs.steps import MODEL, command, must, told, uses

REQUESTS = 12


def main(url: str, target: str) -> None:
    """Try it against a server of the weights of `target`."""
    uses("aiperf")
    for kind in ("chat", "completions"):
        with tempfile.TemporaryDirectory() as made:
            load = ("--concurrency", "4", "--request-count", str(REQUESTS), "--streaming", "--ui", "none")
            sizes = ("--synthetic-input-tokens-mean", "48", "--output-tokens-mean", "24", "--random-seed", "1")
            where = ("--model", MODEL, "--url", url, "--endpoint-type", kind, "--tokenizer", target)
            printed = command(
                *("aiperf", "profile", *where, *load, *sizes, "--artifact-dir", made),
                # Where it believes that it is offline, it takes a folder for a name on the hub. "0" is offline to it.
                **{"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": "", "COLUMNS": "200"},
            )
            [report] = Path(made).rglob("profile_export_aiperf.json")
            found = json.loads(report.read_text())
        must(found["request_count"]["avg"] == REQUESTS, f"{kind}: all requests succeed", found.get("error_summary"))
        told(f"{kind}, streamed, 4 at once", f"{REQUESTS} requests")
        speculative = sorted(name for name in found if "accept" in name or "spec" in name)
        must(speculative and "pec" in printed, f"{kind}: a section on speculation", (sorted(found), printed[-1500:]))
        told(f"{kind}: speculation in its report", ", ".join(speculative))
