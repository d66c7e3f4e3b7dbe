"""On a GPU: identity in float32, and a step's profile, plain and as CUDA graphs, against the card's bandwidth.

`python -m recipes.gpu --out DIR` first checks greedy identity of the embedded pair in float32 on the card, for a chain,
a branching tree, PEARL on two streams, and compiled forwards. Then it steps a random Llama of about a billion
parameters in bfloat16 with a draft model of one layer, alone and in a batch of 8, compiled and not. While a forward is
bound by memory it cannot take less than reading the weights once, so forwards are given beside `weights / bandwidth`,
with the bandwidth of the card measured by copying a large tensor. Writes `rows.jsonl`, `summary.json` and `table.md`.
Without a GPU it says so and ends.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress
from transformers import PreTrainedModel

import outrider
from outrider import InputError, Sampling, Step
from outrider.load import ASSETS
from outrider.proof.identity import identity
from recipes.record import circumstances, write
from recipes.report import COLUMNS, table
from recipes.speed import PARTS, Row, read_prompts
from recipes.tree_cost import random_llama
from recipes.trial import Out

PAIRS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("chain", {}),
    ("tree", {"tree": "gumbel:branching=3x2x1x1"}),
    ("pearl", {"decoding": "pearl:4"}),
    ("chain, compiled", {"compile": True}),
)
"""What must give the tokens of plain decoding."""
GREEDY = Sampling(temperature=0.0, seed=0)


def bandwidth(device: torch.device, num_bytes: int = 1 << 30, rounds: int = 20) -> float:
    """Bytes per second that the card reads and writes, from copies of a large tensor; the best of several."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    spent = [timed(lambda: target.copy_(source), device) for _ in range(rounds)]
    return 2 * num_bytes / min(spent)


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call, the card's work included."""
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    call()
    torch.cuda.synchronize(device)
    return time.perf_counter() - began


def identities(num_prompts: int = 4, max_new_tokens: int = 48) -> list[dict[str, Any]]:
    """Greedy identity of the embedded pair in float32 on the card."""
    found = []
    prompts = [prompt for _, _, prompt in read_prompts(ASSETS / "prompts.jsonl")[:num_prompts]]
    for name, parts in PAIRS:
        engine = outrider.load(dtype="float32", device="cuda", **parts)
        seen = identity(engine, [engine.encode(prompt) for prompt in prompts], max_new_tokens)
        found.append({"pair": name, "tokens": seen.num_tokens, "holds": seen.holds, "differ": len(seen.differences)})
    return found


def weight_bytes(model: PreTrainedModel) -> int:
    """What a forward reads of a model at least."""
    return sum(weight.nbytes for weight in model.parameters())


def profile(target: PreTrainedModel, draft: Path, *, batch: int, compile: bool, steps: int, gamma: int) -> list[Row]:
    """Steps of one engine, after as many that warm up."""
    engine = outrider.load(
        target,
        drafter=f"model:path={draft}",
        length=f"fixed:{gamma}",
        max_slots=batch,
        max_context=1024,
        compile=compile,
    )
    device = engine.parts.target.device
    for i in range(batch):
        prompt = [(7 * i + k) % target.config.vocab_size for k in range(128)]
        engine.add(prompt, max_new_tokens=700, sampling=GREEDY, ignore_eos=True)
    rows: list[Row] = []
    for number in range(2 * steps):
        made: list[Step] = []
        spent = timed(lambda sink=made.append: engine.step(sink), device)
        if number >= steps and len(made) == batch:
            parts = {part: getattr(made[0].timing, part) for part in PARTS}
            rows.append({"batch": batch, "compiled": compile, "number": number, "seconds": spent, **parts})
    return rows


def summarise(rows: Sequence[Row], floor: float) -> list[dict[str, Any]]:
    """Medians by batch size and way; `floor` is how long reading the target's weights takes."""
    found = []
    for key in dict.fromkeys((row["batch"], row["compiled"]) for row in rows):
        some = [row for row in rows if (row["batch"], row["compiled"]) == key]
        middle = {name: statistics.median(row[name] for row in some) for name in ("seconds", *PARTS)}
        found.append({"batch": key[0], "compiled": key[1], **middle, "target_over_floor": middle["target"] / floor})
    return found


def to_markdown(summary: Mapping[str, Any]) -> str:
    """The summary as tables."""
    made = summary["circumstances"]
    about = (
        f"`python -m recipes.gpu`: {summary['card']}, {summary['bandwidth'] / 1e9:.0f} GB/s measured; torch "
        f"{made['versions']['torch']}, outrider {made['versions']['outrider']} ({made['commit']}); {made['date']}. The "
        f"target's weights are {summary['weight_bytes'] / 1e9:.2f} GB, {1e3 * summary['floor']:.2f} ms to read.\n"
    )
    same = table(("pair", "tokens", "holds", "differences"), [list(each.values()) for each in summary["identities"]])
    steps = [
        [
            each["batch"],
            "CUDA graphs" if each["compiled"] else "plain",
            *(f"{1e3 * each[name]:.2f}" for name in ("seconds", *PARTS)),
            f"{each['target_over_floor']:.2f}",
        ]
        for each in summary["steps"]
    ]
    head = ("batch", "forwards", "step ms", *PARTS, "target over floor")
    return "\n".join([about, "## Identity in float32\n", same, "## Steps\n", table(head, steps)])


def run(out: Path, *, steps: int = 64, gamma: int = 5, layers: int = 16, hidden: int = 2048) -> dict[str, Any]:
    """Measure and write; returns the summary.

    Raises:
        InputError: There is no GPU.
    """
    if not torch.cuda.is_available():
        raise InputError("this recipe needs a CUDA device, and torch finds none here")
    given = dict(locals())
    device = torch.device("cuda")
    out.mkdir(parents=True, exist_ok=True)
    began = circumstances(given)
    same = identities()
    shape = {"hidden": hidden, "heads": hidden // 64, "kv_heads": max(1, hidden // 256)}
    target = random_llama(layers=layers, **shape).to(device, torch.bfloat16)
    rate = bandwidth(device)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as place, Progress(*COLUMNS) as progress:
        random_llama(layers=1, **shape).to(torch.bfloat16).save_pretrained(place)
        task = progress.add_task("engines", total=4)
        for compile in (False, True):
            for batch in (1, 8):
                rows += profile(target, Path(place), batch=batch, compile=compile, steps=steps, gamma=gamma)
                progress.advance(task)
    floor = weight_bytes(target) / rate
    summary = {
        "card": torch.cuda.get_device_name(device),
        "bandwidth": rate,
        "weight_bytes": weight_bytes(target),
        "floor": floor,
        "identities": same,
        "steps": summarise(rows, floor),
        "circumstances": began,
    }
    write(out / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write(out / "summary.json", json.dumps(summary, indent=2) + "\n")
    write(out / "table.md", to_markdown(summary))
    return summary


def main(
    out: Out,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of each engine.")] = 64,
    gamma: Annotated[int, typer.Option(min=1, help="Length of the chains.")] = 5,
) -> None:
    """Check and measure on a GPU."""
    try:
        typer.echo(to_markdown(run(out, steps=steps, gamma=gamma)))
    except InputError as error:
        raise typer.BadParameter(str(error)) from error


if __name__ == "__main__":
    typer.run(main)
