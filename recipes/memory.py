"""Measure resident memory: transformers with both models, outrider with the pair, and growth over many requests.

Every figure comes from a fresh process and is VmRSS of /proc/self/status in MB (10^6 bytes); this needs Linux.
`python -m recipes.memory` prints one JSON object: `transformers` (both models loaded plainly, each generates some
tokens), `outrider` (the pair loaded, the same tokens), their `difference`, and `growth` (one engine, from the end of
the warm-up to the last of many requests in a row). Each is a median with its lowest and highest value over the repeats.
"""

import json
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

Part = Literal["transformers", "outrider", "growth"]

PROMPT = "Once upon a time, there was a little fox who"
NEW_TOKENS = 16
ASSETS = Path(__file__).parent.parent / "outrider" / "assets"
"""Written out, because a process that measures transformers must not import outrider."""


def resident() -> float:
    """VmRSS in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise OSError("/proc/self/status has no VmRSS")


def plain_transformers(target: Path, draft: Path, dtype: str, threads: int) -> dict[str, float]:
    """Both models, each generating a few tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(threads)
    imported = resident()
    tokenizer = AutoTokenizer.from_pretrained(target)
    models = [AutoModelForCausalLM.from_pretrained(place, dtype=dtype).eval() for place in (target, draft)]
    loaded = resident()
    given = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    for model in models:
        model.generate(**given, do_sample=False, min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS)
    return {"imported": imported, "loaded": loaded, "worked": resident()}


def outrider_pair(target: Path, draft: Path, dtype: str, threads: int) -> dict[str, float]:
    """The pair in an engine, generating as many tokens with speculation."""
    import torch

    import outrider

    torch.set_num_threads(threads)
    imported = resident()
    engine = outrider.load(target, drafter=f"model:path={draft}", length="fixed:4", dtype=dtype)
    loaded = resident()
    greedy = outrider.Sampling(temperature=0)
    engine.generate([PROMPT], max_new_tokens=NEW_TOKENS, sampling=greedy, ignore_eos=True)
    return {"imported": imported, "loaded": loaded, "worked": resident()}


def many_requests(
    target: Path, draft: Path, dtype: str, threads: int, requests: int, warmup: int, seed: int = 0
) -> dict[str, float]:
    """One engine, requests in a row with prompts of 8 to 128 tokens; the first is the longest."""
    import torch

    import outrider

    torch.set_num_threads(threads)
    engine = outrider.load(target, drafter=f"model:path={draft}", length="fixed:4", dtype=dtype)
    dice = random.Random(seed)
    warm = 0.0
    for i in range(requests):
        length = dice.randint(8, 128) if i else 128
        prompt = [dice.randrange(engine.parts.target.vocab_size) for _ in range(length)]
        sampling = outrider.Sampling(temperature=float(i % 2), seed=i)
        engine.generate([prompt], max_new_tokens=NEW_TOKENS, sampling=sampling, ignore_eos=True)
        if i + 1 == warmup:
            warm = resident()
    last = resident()
    return {"after_warmup": warm, "after_last": last, "growth": last - warm}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest, in MB."""
    return {"median": round(statistics.median(values), 2), "low": round(min(values), 2), "high": round(max(values), 2)}


def in_fresh_process(part: Part, options: Sequence[str]) -> dict[str, float]:
    """Run one part in a process of its own."""
    command = [sys.executable, "-m", "recipes.memory", "--part", part, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def run(
    *,
    target: Path = ASSETS / "target",
    draft: Path = ASSETS / "draft",
    requests: int = 200,
    warmup: int = 20,
    repeats: int = 3,
    dtype: str = "bfloat16",
    threads: int = 2,
) -> dict[str, Any]:
    """Measure all parts in turns and return what `python -m recipes.memory` prints."""
    arguments = dict(locals())
    options = [text for name, value in arguments.items() if name != "repeats" for text in (f"--{name}", str(value))]
    parts: tuple[Part, ...] = ("transformers", "outrider", "growth")
    raw = [{part: in_fresh_process(part, options) for part in parts} for _ in range(repeats)]
    from recipes.record import circumstances

    summary: dict[str, Any] = {
        part: {name: spread([each[part][name] for each in raw]) for name in raw[0][part]} for part in parts
    }
    summary["difference"] = spread([each["outrider"]["worked"] - each["transformers"]["worked"] for each in raw])
    return {"unit": "MB", **summary, "raw": raw, "circumstances": circumstances(arguments)}


def main(
    target: Annotated[Path, typer.Option(help="Directory of the target.")] = ASSETS / "target",
    draft: Annotated[Path, typer.Option(help="Directory of the draft model.")] = ASSETS / "draft",
    requests: Annotated[int, typer.Option(min=1, help="Requests in a row.")] = 200,
    warmup: Annotated[int, typer.Option(min=1, help="After how many of them the first look is taken.")] = 20,
    repeats: Annotated[int, typer.Option(min=1, help="Fresh processes per part.")] = 3,
    dtype: Annotated[str, typer.Option(help="What both models compute in.")] = "bfloat16",
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 2,
    out: Annotated[Path | None, typer.Option(help="Also write the object to this file.")] = None,
    part: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure resident memory against transformers, and growth over many requests."""
    if warmup > requests:
        raise typer.BadParameter(f"--warmup must be <= --requests ({requests}), got {warmup}")
    for place in (target, draft):
        if not (place / "config.json").is_file():
            raise typer.BadParameter(f"{place} is not a model's directory: it has no config.json")
    if part == "transformers":
        print(json.dumps(plain_transformers(target, draft, dtype, threads)))
    elif part == "outrider":
        print(json.dumps(outrider_pair(target, draft, dtype, threads)))
    elif part == "growth":
        print(json.dumps(many_requests(target, draft, dtype, threads, requests, warmup)))
    else:
        text = json.dumps(
            run(
                target=target,
                draft=draft,
                requests=requests,
                warmup=warmup,
                repeats=repeats,
                dtype=dtype,
                threads=threads,
            ),
            indent=2,
        )
        if out is not None:
            from recipes.record import write

            write(out, text + "\n")
        print(text)


if __name__ == "__main__":
    typer.run(main)
