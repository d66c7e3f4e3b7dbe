"""The picture of the front page: tokens per second from one file of a real model, here and in other engines.

`python -m recipes front --target FILE.gguf --workload humaneval --environments DIR --out OUT` runs `outrider bench` on
some prompts, greedy, one at a time, and draws `front.svg` of what it found. With `--as-is` nothing is measured, and the
picture is drawn of the folder that is there.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.bench.folder import read_record
from outrider.bench.plot import Stacks, draw
from outrider.core import files
from outrider.core.inputs import InputError
from recipes import options

WORDS = {"default": "Outrider", "plain (no drafting)": "Outrider, plain"}
"""How the picture names ways."""
SIZE = (7.0, 2.2)
"""Inches of the picture; it grows with the ways."""
QUICK = {"num_prompts": 2, "max_new_tokens": 8, "rounds": 1, "peers": ""}


def picture(summary: Mapping[str, Any], title: str) -> str:
    """Tokens per second of each way as SVG, the fastest on top.

    Args:
        summary: What `outrider bench` wrote into `summary.json`.
        title: What stands above it.

    Raises:
        InputError: Nothing was measured, or matplotlib is not installed.
    """
    ways = sorted(summary["ways"], key=lambda way: -way["output_throughput"])
    if not ways:
        raise InputError(f"nothing was measured: {summary['verdict']}")
    names = [WORDS.get(way["way"], way["way"]) for way in ways]
    speeds = [round(way["output_throughput"], 1) for way in ways]
    plain = ["plain" in name or name == "transformers" for name in names]
    parts = {
        "plain decoding": [speed * each for speed, each in zip(speeds, plain, strict=True)],
        "with drafts": [speed * (not each) for speed, each in zip(speeds, plain, strict=True)],
    }
    named = [f"{name}: {speed:g}" for name, speed in zip(names, speeds, strict=True)]
    return draw([Stacks(title=title, x="tokens per second", names=named, parts=parts)], size=SIZE)


def main(
    out: options.Out = None,
    target: options.Target = None,
    workload: Annotated[str, typer.Option(help="As of `outrider bench`.")] = "built-in",
    peers: Annotated[str, typer.Option(help="Other engines, with commas.")] = "llama,transformers",
    environments: Annotated[Path | None, typer.Option(help="Folder of their environments.")] = None,
    num_prompts: options.NumPrompts = 8,
    max_new_tokens: options.MaxNewTokens = 96,
    rounds: options.Rounds = 3,
    as_is: Annotated[bool, typer.Option("--as-is", help="Measure nothing; draw what the folder has.")] = False,
) -> None:
    """Measure and draw."""
    if as_is and out is None:
        raise InputError("--as-is draws what a folder has; give the folder with --out")
    command = [sys.executable, "-m", "outrider", "bench", "--temperature", "0", "--workload", workload]
    command += ["--num-prompts", str(num_prompts), "--max-new-tokens", str(max_new_tokens), "--rounds", str(rounds)]
    command += ["--peers", peers, *(["--target", target] if target else [])]
    command += ["--environments", str(environments)] if environments else []
    command += ["--out", str(out)] if out else []
    if not as_is and (status := subprocess.run(command).returncode):
        raise typer.Exit(status)
    if out is not None:
        try:
            summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{out} is not the folder of a run: {error}") from error
        found = read_record(out)["circumstances"]
        name = Path(target).name if target else "the embedded pair"
        title = f"{name}, {found['cpu']}, {found['threads']} threads, one prompt at a time"
        files.replace(out / "front.svg", picture(summary, title).encode())
