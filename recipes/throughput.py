"""Tokens per second of a full engine: more requests than slots, so that whoever ends makes room for the next.

`python -m recipes.throughput --out DIR` sends the shipped prompts through engines over the embedded pair with 1 and
with 8 slots, greedily: plain, and with chains of 2 to 5 drafted tokens. All ways take turns, in rounds. A batch of
fixed size would be judged by its slowest request; here slots never wait for each other. Writes `rows.jsonl`,
`summary.json` and `table.md`.
"""

import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress

import outrider
from outrider import InputError, Sampling
from outrider.engine.engine import Engine
from outrider.load import EMBEDDED_DRAFT, EMBEDDED_TARGET
from recipes.record import circumstances, write
from recipes.report import COLUMNS, table
from recipes.speed import Row, read_prompts
from recipes.trial import PROMPTS, Out, Threads

SLOTS = (1, 8)
LENGTHS = (0, 2, 3, 4, 5)
"""Drafted tokens per step; 0 decodes plainly."""
GREEDY = Sampling(temperature=0.0, seed=0)


def name_of(length: int) -> str:
    """A way's name."""
    return f"chain of {length}" if length else "plain"


def engine_of(length: int, slots: int, target: str) -> Engine:
    """An engine over the pair; plain ones run blocks of one column, which is faster here."""
    if length == 0:
        return outrider.load(target, drafter="none", max_slots=slots, pad_to=1)
    drafter = f"model:path={EMBEDDED_DRAFT}"
    return outrider.load(target, drafter=drafter, length=f"fixed:{length}", max_slots=slots)


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Tokens per second by slots and way: medians over rounds, and their ratio to plain decoding of the same round."""
    found = []
    for slots, way in dict.fromkeys((row["slots"], row["way"]) for row in rows):
        rates = {(r["round"], r["way"]): r["tokens"] / r["seconds"] for r in rows if r["slots"] == slots}
        own = {round_: rate for (round_, name), rate in rates.items() if name == way}
        ratios = [rate / rates[round_, name_of(0)] for round_, rate in own.items()]
        found.append(
            {
                "slots": slots,
                "way": way,
                "rate": statistics.median(own.values()),
                "over_plain": statistics.median(ratios),
                "spread": [min(ratios), max(ratios)],
            }
        )
    return found


def to_markdown(summary: Mapping[str, Any]) -> str:
    """The summary as a table."""
    made = summary["circumstances"]
    about = (
        f"`python -m recipes.throughput`: {made['cpu']}, {made['threads']} threads, torch {made['versions']['torch']}, "
        f"outrider {made['versions']['outrider']} ({made['commit']}); {made['date']}. Medians over rounds; the ratio "
        "to plain decoding with its extremes.\n"
    )
    lines = [
        [e["slots"], e["way"], f"{e['rate']:.0f}", "{:.2f} [{:.2f}, {:.2f}]".format(e["over_plain"], *e["spread"])]
        for e in summary["entries"]
    ]
    return about + "\n" + table(("slots", "way", "tokens/s", "over plain"), lines)


def run(
    out: Path,
    *,
    num_prompts: int = 40,
    max_new_tokens: int = 96,
    rounds: int = 3,
    threads: int = 2,
    target: str = str(EMBEDDED_TARGET),
) -> dict[str, Any]:
    """Measure and write; returns the summary."""
    given = {**locals(), "target": Path(target).name}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        began = circumstances(given)
        engines = {(slots, n): engine_of(n, slots, target) for slots in SLOTS for n in LENGTHS}
        some = next(iter(engines.values()))
        prompts = [some.encode(prompt) for _, _, prompt in read_prompts(PROMPTS)[:num_prompts]]
        rows: list[Row] = []
        with Progress(*COLUMNS) as progress:
            task = progress.add_task("runs", total=(rounds + 1) * len(engines))
            for round_ in range(-1, rounds):
                for slots, n in random.Random(round_).sample(list(engines), len(engines)):
                    engine = engines[slots, n]
                    start = time.perf_counter()
                    outputs = engine.generate(prompts, max_new_tokens=max_new_tokens, sampling=GREEDY, ignore_eos=True)
                    seconds = time.perf_counter() - start
                    engine.rest()
                    progress.advance(task)
                    if round_ >= 0:
                        tokens = sum(len(output.tokens) for output in outputs)
                        rows.append(
                            {"slots": slots, "way": name_of(n), "round": round_, "tokens": tokens, "seconds": seconds}
                        )
    finally:
        torch.set_num_threads(before)
    rows.sort(key=lambda row: (row["slots"], row["way"] != name_of(0), row["way"], row["round"]))
    summary = {"entries": summarise(rows), "circumstances": began}
    out.mkdir(parents=True, exist_ok=True)
    write(out / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write(out / "summary.json", json.dumps(summary, indent=2) + "\n")
    write(out / "table.md", to_markdown(summary))
    return summary


def main(
    out: Out,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests.")] = 40,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 96,
    rounds: Annotated[int, typer.Option(min=1, help="How often every way is run.")] = 3,
    threads: Threads = 2,
) -> None:
    """Measure the throughput of full engines."""
    try:
        summary = run(out, num_prompts=num_prompts, max_new_tokens=max_new_tokens, rounds=rounds, threads=threads)
    except InputError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(to_markdown(summary))


if __name__ == "__main__":
    typer.run(main)
