"""On a GPU: identity in float32, and a step's profile, plain and as CUDA graphs, against the card's bandwidth.

`python -m recipes gpu --out DIR` first checks greedy identity of the embedded pair in float32 on the card, for a chain,
a branching tree, PEARL on two streams, and compiled forwards. Then it steps a random Llama of about a billion
parameters in bfloat16 with a draft model of one layer, alone and in a batch of 8, compiled and not. A forward that is
bound by memory takes at least as long as reading the weights once. So forwards are listed beside `weights / bandwidth`;
the bandwidth of the card is measured by copying a large tensor. Without a GPU the recipe ends with an error.
"""

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import PreTrainedModel

import outrider
from outrider.bench.bare import random_llama, seconds
from outrider.bench.evidence import Estimate, Row
from outrider.bench.folder import folder
from outrider.bench.plot import Bars
from outrider.bench.report import Findings, Table
from outrider.bench.runs import PARTS
from outrider.bench.turns import Turn
from outrider.bench.workload import PROMPTS, read_prompts
from outrider.core.types import InputError, Sampling, Step
from outrider.proof.identity import identity
from recipes import options

PAIRS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("chain", {}),
    ("tree", {"tree": "gumbel:branching=3x2x1x1"}),
    ("pearl", {"decoding": "pearl:4"}),
    ("chain, compiled", {"forward": "compiled"}),
)
"""Ways to decode that must give the tokens of plain decoding."""
GREEDY = Sampling(temperature=0.0, seed=0)
QUICK = {"steps": 8}


def bandwidth(device: torch.device, num_bytes: int = 1 << 30, rounds: int = 20) -> float:
    """Bytes per second that the card reads and writes: the best of several copies of a large tensor."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / min(seconds(lambda: target.copy_(source), device) for _ in range(rounds))


def identities(num_prompts: int = 4, max_new_tokens: int = 48) -> list[dict[str, Any]]:
    """Greedy identity of the embedded pair in float32 on the card."""
    found = []
    prompts = [prompt for _, _, prompt in read_prompts(PROMPTS)[:num_prompts]]
    for name, parts in PAIRS:
        engine = outrider.load(dtype="float32", device="cuda", **parts)
        seen = identity(engine, [engine.encode(prompt) for prompt in prompts], max_new_tokens)
        found.append({"pair": name, "tokens": seen.num_tokens, "holds": seen.holds, "differ": len(seen.differences)})
    return found


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that a forward reads at least."""
    return sum(weight.nbytes for weight in model.parameters())


def profile(target: PreTrainedModel, draft: Path, *, batch: int, compile: bool, steps: int, gamma: int) -> list[Row]:
    """Steps of one engine, after as many steps of warm-up."""
    engine = outrider.load(
        target,
        drafter=f"model:path={draft}",
        length=f"fixed:{gamma}",
        max_slots=batch,
        max_context=1024,
        forward="compiled" if compile else "eager",
    )
    device = engine.parts.target.device
    for i in range(batch):
        prompt = [(7 * i + k) % target.config.vocab_size for k in range(128)]
        engine.add(prompt, max_new_tokens=700, sampling=GREEDY, ignore_eos=True)
    rows: list[Row] = []
    for number in range(2 * steps):
        made: list[Step] = []
        spent = seconds(partial(engine.step, made.append), device)
        if number >= steps and len(made) == batch:
            parts = {part: getattr(made[0].timing, part) for part in PARTS}
            rows.append({"batch": batch, "compiled": compile, "number": number, "seconds": spent, **parts})
    return rows


def summarise(rows: Sequence[Row], floor: float) -> list[dict[str, Any]]:
    """Medians by batch size and way; `floor` is the time for reading the target's weights."""
    found = []
    for key in dict.fromkeys((row["batch"], row["compiled"]) for row in rows):
        some = [row for row in rows if (row["batch"], row["compiled"]) == key]
        middle = {name: statistics.median(row[name] for row in some) for name in ("seconds", *PARTS)}
        low, high = (np.quantile([row["target"] for row in some], part) / floor for part in (0.25, 0.75))
        over = {"target_over_floor": middle["target"] / floor, "low": float(low), "high": float(high)}
        found.append({"batch": key[0], "compiled": key[1], **middle, **over})
    return found


def findings(summary: Mapping[str, Any]) -> Findings:
    """The summary as tables and bars."""
    same = [list(each.values()) for each in summary["identities"]]
    lines = [
        [
            each["batch"],
            "CUDA graphs" if each["compiled"] else "plain",
            *(f"{1e3 * each[name]:.2f}" for name in ("seconds", *PARTS)),
            f"{each['target_over_floor']:.2f}",
        ]
        for each in summary["steps"]
    ]
    names = [f"batch of {each['batch']}{', CUDA graphs' if each['compiled'] else ''}" for each in summary["steps"]]
    over = [Estimate(value=e["target_over_floor"], low=e["low"], high=e["high"]) for e in summary["steps"]]
    text = (
        f"{summary['card']}, {summary['bandwidth'] / 1e9:.0f} GB/s measured. The target's weights are "
        f"{summary['weight_bytes'] / 1e9:.2f} GB, {1e3 * summary['floor']:.2f} ms to read."
    )
    return Findings(
        tables=[
            Table(title="Identity in float32", head=("pair", "tokens", "holds", "differences"), lines=same),
            Table(title="Steps", head=("batch", "forwards", "step ms", *PARTS, "target over floor"), lines=lines),
        ],
        panels=[
            Bars(
                title="The target's forward",
                x="times that reading the weights takes",
                names=names,
                groups={"over floor": over},
            )
        ],
        text=text,
        summary=summary,
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """A number of requests that step together, with or without CUDA graphs."""

    batch: int
    compiled: bool

    @property
    def name(self) -> str:
        """Unique among the cases."""
        return f"batch of {self.batch}, {'compiled' if self.compiled else 'plain'}"


def run(out: Path | None, *, steps: int = 64, gamma: int = 5, layers: int = 16, hidden: int = 2048) -> dict[str, Any]:
    """Measure and write; returns the summary.

    Raises:
        InputError: There is no GPU.
    """
    if not torch.cuda.is_available():
        raise InputError("this recipe needs a CUDA device, and torch finds none here")
    given = dict(locals())
    device = torch.device("cuda")
    with folder(out, "gpu", given) as place, tempfile.TemporaryDirectory() as draft:
        same = identities()
        shape = {"hidden": hidden, "heads": hidden // 64, "kv_heads": max(1, hidden // 256)}
        target = random_llama(layers=layers, **shape).to(device)
        random_llama(layers=1, **shape).save_pretrained(draft)
        rate = bandwidth(device)

        def stepped(turn: Turn[Case, Case]) -> Row:
            batch, compiled = turn.way.batch, turn.way.compiled
            each = profile(target, Path(draft), batch=batch, compile=compiled, steps=steps, gamma=gamma)
            return {"each": each}

        cases = [Case(batch=batch, compiled=compiled) for compiled in (False, True) for batch in (1, 8)]
        made = place.take("engines", [Turn(round=0, way=case, job=case) for case in cases], stepped)
        rows = [each for row in made for each in row["each"]]
        floor = weight_bytes(target) / rate
        summary = {
            "card": torch.cuda.get_device_name(device),
            "bandwidth": rate,
            "weight_bytes": weight_bytes(target),
            "floor": floor,
            "identities": same,
            "steps": summarise(rows, floor),
        }
        place.finish(findings(summary))
        return summary


def main(
    out: options.Out = None,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of each engine.")] = 64,
    gamma: Annotated[int, typer.Option(min=1, help="Length of the chains.")] = 5,
) -> None:
    """Check and measure on a GPU."""
    run(out, steps=steps, gamma=gamma)
