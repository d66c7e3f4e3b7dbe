"""Products of packed weights with a few states: milliseconds and bytes read a second, beside bfloat16 and the memory.

`python -m recipes products --out DIR` multiplies 1 to 16 states of bfloat16 with matrices of the shapes of
Qwen2.5-Coder-1.5B: q, k, v together; the output of attention; gate, up together; down. Several copies of each matrix
take turns, more than the caches of a processor hold. Torch's product with bfloat16 weights and the sum of a large
tensor, which reads as fast as the memory gives, take turns with them. It wants a quiet machine.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn import functional as F

from outrider.bench.evidence import Row
from outrider.bench.folder import folder
from outrider.bench.report import Findings, Table
from outrider.bench.turns import Turn, turns
from outrider.core.types import InputError
from outrider.lm.weights.blocks import KINDS, PANEL, BlockWeight
from outrider.lm.weights.operators import block_linear
from recipes import options
from recipes.label import Label
from recipes.quartiles import quartiles, spread

BFLOAT16, MEMORY = "torch, bfloat16", "memory"
QUICK = {"kinds": "Q4_K", "rows": "1,5", "shapes": "256x512", "megabytes": 1, "rounds": 1}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured."""

    out: options.Out = None
    kinds: Annotated[str, typer.Option(help="Formats of blocks, with commas.")] = "Q4_K,Q6_K,Q8_0,BF16"
    rows: Annotated[str, typer.Option(help="How many states are multiplied at once, with commas.")] = "1,2,4,5,6,8,16"
    shapes: Annotated[str, typer.Option(help="Numbers of a state and of an output, with commas.")] = (
        "1536x2048,1536x1536,1536x17920,8960x1536"
    )
    megabytes: Annotated[int, typer.Option(min=1, help="Of all copies of a matrix together, at least.")] = 128
    threads: options.Threads = 2
    rounds: options.Rounds = 3

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.chosen_kinds) - set(KINDS)):
            raise InputError(f"unknown kind {unknown[0]!r}; available: {', '.join(KINDS)}")
        _ = self.chosen_rows, self.chosen_shapes

    @property
    def chosen_kinds(self) -> list[str]:
        """The formats."""
        return self.kinds.split(",")

    @property
    def chosen_rows(self) -> Sequence[int]:
        """How many states."""
        return options.whole_numbers("--rows", self.rows)

    @property
    def chosen_shapes(self) -> list[tuple[int, int]]:
        """Numbers of a state and of an output."""
        sizes = [shape.split("x") for shape in self.shapes.split(",")]
        if any(len(size) != 2 or not all(number.isdecimal() for number in size) for size in sizes):
            raise InputError(f"--shapes must be two numbers each, such as 1536x2048, got {self.shapes}")
        if wrong := [size[0] for size in sizes if int(size[0]) % 256]:
            raise InputError(f"the numbers of a state must be a multiple of 256, got {wrong[0]}")
        return [(int(features), int(out)) for features, out in sizes]


def random_blocks(kind: str, features: int, out: int) -> BlockWeight:
    """A matrix of random codes with equal scales."""
    layout = KINDS[kind]
    chunks = torch.randint(0, 256, (-(-out // PANEL), features // layout.weights, layout.chunk), dtype=torch.uint8)
    scales = torch.full((PANEL * layout.halves,), 0.01, dtype=torch.float16)
    chunks[..., : 2 * PANEL * layout.halves] = scales.view(torch.uint8)
    return BlockWeight(kind=kind, out_features=out, in_features=features, data=chunks.flatten(1))


def copies(weight: Tensor, megabytes: int) -> list[Tensor]:
    """Enough copies of a weight that they are so many megabytes together."""
    return [weight.clone() for _ in range(-(-megabytes * 1_000_000 // weight.nbytes))]


def product(way: str, features: int, out: int, plan: Plan) -> tuple[int, Callable[[Tensor], object]]:
    """Bytes that are read, and what reads them once."""
    if way == MEMORY:
        everything = torch.ones(plan.megabytes * 250_000)
        return everything.nbytes, lambda _: everything.sum()
    if way == BFLOAT16:
        plain = copies(torch.randn(out, features).to(torch.bfloat16), plan.megabytes)
        return sum(each.nbytes for each in plain), lambda states: [F.linear(states, each) for each in plain]
    weight = random_blocks(way, features, out)
    packed = [
        BlockWeight(kind=way, out_features=out, in_features=features, data=data)
        for data in copies(weight.data, plan.megabytes)
    ]
    count = sum(each.data.nbytes for each in packed)
    return count, lambda states: [block_linear(states, [each], None) for each in packed]


def measured(way: str, features: int, out: int, plan: Plan) -> list[dict[str, Any]]:
    """Seconds of one product, and bytes a second, by the number of states."""
    size, run = product(way, features, out, plan)
    count = 1 if way == MEMORY else max(1, size // product_bytes(way, features, out))
    found = []
    for rows in plan.chosen_rows if way != MEMORY else [1]:
        states = torch.randn(rows, features, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16)
        run(states)
        began = time.perf_counter()
        run(states)
        seconds = time.perf_counter() - began
        found.append({"rows": rows, "seconds": seconds / count, "bytes_per_second": size / seconds})
    return found


def product_bytes(way: str, features: int, out: int) -> int:
    """Bytes of one matrix."""
    if way == BFLOAT16:
        return 2 * features * out
    layout = KINDS[way]
    return -(-out // PANEL) * (features // layout.weights) * layout.chunk


def findings(rows: Sequence[Row], plan: Plan) -> Findings:
    """A table for each shape."""
    tables, summary = [], []
    for features, out in plan.chosen_shapes:
        lines = []
        for way in [*plan.chosen_kinds, BFLOAT16, MEMORY]:
            mine = [row for row in rows if (row["way"], row["job"]) == (way, f"{features}x{out}")]
            cells = []
            for i, first in enumerate(mine[0]["figures"]):
                times = spread([row["figures"][i]["seconds"] for row in mine])
                rate = spread([row["figures"][i]["bytes_per_second"] for row in mine])["median"]
                shown = "" if way == MEMORY else f"{quartiles(times, '.3f', 1e3)} ms, "
                cells.append(f"{shown}{rate / 1e9:.1f} GB/s")
                summary.append(
                    {"shape": f"{features}x{out}", "way": way, "rows": first["rows"], "seconds": times, "rate": rate}
                )
            lines.append([way, *cells, *[""] * (len(plan.chosen_rows) - len(cells))])
        head = ["weights", *(f"{count} states" for count in plan.chosen_rows)]
        tables.append(Table(head=head, lines=lines, title=f"{features} x {out}"))
    text = "Median and quartiles of the rounds, and bytes of weights read a second. The last row reads memory alone."
    return Findings(tables=tables, text=text, summary={"products": summary})


@options.with_fields(Plan)
def main(plan: Plan) -> list[dict[str, Any]]:
    """Measure products with packed weights."""
    torch.set_num_threads(plan.threads)
    ways = Label.each([*plan.chosen_kinds, BFLOAT16, MEMORY])
    jobs = [Label(name=f"{features}x{out}", value=(features, out)) for features, out in plan.chosen_shapes]

    def one(turn: Turn[Label, Label]) -> Row:
        features, out = turn.job.value
        figures = measured(turn.way.name, features, out, plan)
        return {"way": turn.way.name, "job": turn.job.name, "figures": figures}

    with folder(plan.out, "products", vars(plan)) as place, torch.inference_mode():
        rows = place.take("products", turns(ways, jobs, rounds=plan.rounds), one)
        place.finish(findings(rows, plan))
        return rows
