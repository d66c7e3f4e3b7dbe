"""One command for a GPU: right answers, every kind of forward, a step against the memory, training, load. Ten minutes.

`python -m recipes gpu --out DIR` runs its parts one after the other, each with a process and a time limit of its own:

- identities: greedy outputs are those of plain decoding, in float32 and up to ties in bfloat16, for every verifier and
  for PEARL on two streams.
- laws: a chi-square test of sampled outputs for every verifier.
- forwards: every kind of forward runs, says the same, and its tokens per second.
- profile: the parts of a step of a random Llama of about a billion parameters, beside the time that the memory needs to
  give its weights once. The bandwidth is measured by copying a large tensor.
- training: a head for the embedded target, trained for two minutes on the target's own texts, then decoded with.
- serving: requests that arrive at random moments; whether memory stays flat.

Each part also says how many graphs the compiler skipped and how many functions it compiled again; both must be 0. Rows
are written as they come. A part that fails is one row with its error, and the others go on. Without a GPU the recipe
ends with an error; `--rehearse` runs the same code on a CPU in the smallest size, and its figures mean nothing.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from outrider.bench.evidence import IntervalEstimate, Row
from outrider.bench.folder import Folder, folder
from outrider.bench.plot import Bars
from outrider.bench.report import Findings, Table
from outrider.bench.turns import Turn
from outrider.core.types import InputError
from recipes import options
from recipes.runs import PARTS

QUICK = {"rehearse": True, "parts": "forwards"}
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the recipe, as `recipes.gpu_parts` knows it.

    Attributes:
        limit: Seconds after which its process is ended. All limits together are ten minutes.
        heads: What its table shows of each row.
        title: Of its table.
    """

    name: str
    limit: float
    title: str
    heads: tuple[str, ...]


ALL = (
    Part(name="identities", limit=110, title="Greedy identity", heads=("holds", "tokens", "differ")),
    Part(name="laws", limit=110, title="The law of sampled outputs", heads=("verdict", "p", "draws", "degrees")),
    Part(
        name="forwards",
        limit=80,
        title="Kinds of forward",
        heads=("ran", "holds", "differ", "tokens_per_second", "compiled", "forwards"),
    ),
    Part(name="profile", limit=80, title="Steps, milliseconds", heads=("seconds", *PARTS, "floor", "over_floor")),
    Part(
        name="training",
        limit=160,
        title="A head",
        heads=(
            *("steps", "seconds", "tokens_per_second", "precision", "loss_first", "loss_last"),
            *("block_efficiency_first", "block_efficiency_last", "holds"),
        ),
    ),
    Part(
        name="serving",
        limit=60,
        title="Load",
        heads=("requests", "tokens_per_second", "first_token_median", "first_token_95", "latency_95", "bytes", "flat"),
    ),
)


def rows_of(command: Sequence[str], limit: float) -> Iterator[Row]:
    """The rows that a process prints, as they come. If it fails or takes too long, the last row has the error."""
    around = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    began = time.monotonic()
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, cwd=ROOT, env=around, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        clock = threading.Timer(limit, process.kill)
        clock.start()
        try:
            for line in process.stdout or ():
                # A library may print too.
                with contextlib.suppress(ValueError):
                    row = json.loads(line)
                    if isinstance(row, dict):
                        yield row
            status = process.wait()
        finally:
            clock.cancel()
            process.kill()
        if status:
            late = time.monotonic() - began >= limit
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip().splitlines() or [f"it ended with status {status}"]
            yield {"name": "end", "error": f"stopped after {limit:g} seconds" if late else said[-1][:300]}


def run_part(place: Folder, part: Part, command: Sequence[str]) -> Row:
    """Run a part and keep its rows. Returns the row of the part as a whole."""
    began, errors = time.monotonic(), []
    for row in rows_of(command, part.limit):
        place.add({"phase": part.name, "turn": f"{part.name} | {row.get('name')}", **row})
        if "error" in row:
            errors.append(f"{row['name']}: {row['error']}")
    return {"seconds": time.monotonic() - began, "errors": errors}


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """The newest row of each turn, by part, and what must be true of them."""
    found: dict[str, dict[str, Row]] = {part.name: {} for part in ALL}
    whole = {row["turn"].partition(" | ")[0]: row for row in rows if row["phase"] == "parts"}
    for row in rows:
        if row["phase"] in found:
            own = {name: value for name, value in row.items() if name not in ("phase", "turn")}
            if {"target", "floor"} <= own.keys():
                own["over_floor"] = own["target"] / own["floor"]
            found[row["phase"]][row["name"]] = own
    listed = [row for part in found.values() for row in part.values()]
    return {
        "parts": found,
        "seconds": {name: row["seconds"] for name, row in whole.items()},
        "errors": {name: row["errors"] for name, row in whole.items() if row["errors"]},
        "differences": sum(row.get("holds") is False for row in listed),
        "wrong_laws": sum(row.get("verdict") == "differs" for row in listed),
        "skipped_graphs": sum(row.get("skipped", 0) for row in listed),
        "recompiled": sum(row.get("recompiled", 0) for row in listed),
    }


def findings(summary: Mapping[str, Any], device: str) -> Findings:
    """The summary as tables, and bars of the target's forward."""
    tables = []
    for part in ALL:
        rows = [row for name, row in summary["parts"][part.name].items() if name not in ("begin", "compiler")]
        scale = 1000.0 if part.name == "profile" else 1.0
        lines = [[row["name"], *(_cell(row, head, scale) for head in part.heads), _note(row)] for row in rows]
        if lines:
            tables.append(Table(title=part.title, head=("", *part.heads, "note"), lines=lines))
    steps = [row for row in summary["parts"]["profile"].values() if "over_floor" in row]
    over = [
        IntervalEstimate(
            value=row["over_floor"], low=row["target_low"] / row["floor"], high=row["target_high"] / row["floor"]
        )
        for row in steps
    ]
    panels = []
    if steps:
        names = [row["name"] for row in steps]
        x = "times that reading the weights takes"
        panels = [Bars(title="The target's forward", x=x, names=names, groups={"over floor": over})]
    text = (
        f"{device}. Differences that are no ties: {summary['differences']}; laws that differ: {summary['wrong_laws']}; "
        f"graphs that the compiler skipped: {summary['skipped_graphs']}; functions compiled again: "
        f"{summary['recompiled']}; parts with errors: {len(summary['errors'])}. All five must be 0."
    )
    return Findings(tables=tables, panels=panels, text=text, summary=summary)


def _note(row: Row) -> str:
    """What went wrong, or why something is not possible here."""
    return str(row.get("error") or row.get("refused") or "")


def _cell(row: Row, head: str, scale: float) -> object:
    """A value as a table has it."""
    value = row.get(head, "")
    if not isinstance(value, float):
        return value
    return f"{value if head == 'over_floor' else scale * value:.4g}"


def run(out: Path | None, *, rehearse: bool = False, parts: Sequence[str] = ()) -> dict[str, Any]:
    """Run the parts and write; returns the summary.

    Args:
        parts: Names of parts to run; none: all.

    Raises:
        InputError: There is no GPU, or no part of a name.
    """
    known = {part.name: part for part in ALL}
    if unknown := [name for name in parts if name not in known]:
        raise InputError(f"unknown part {unknown[0]!r}; available: {', '.join(known)}")
    if not rehearse and not torch.cuda.is_available():
        raise InputError("this recipe needs a CUDA device, and torch finds none here; --rehearse runs it on a CPU")
    device = "A rehearsal on a CPU" if rehearse else torch.cuda.get_device_name()
    with folder(out, "gpu", {"rehearse": rehearse}) as place:

        def done(turn: Turn[Part, Part]) -> Row:
            scale = "rehearsal" if rehearse else "card"
            return run_part(place, turn.way, [sys.executable, "-m", "recipes.gpu_parts", turn.way.name, scale])

        place.take("parts", [Turn(round=0, way=known[name], job=known[name]) for name in parts or known], done)
        summary = {"device": device, **summarise(place.rows)}
        place.finish(findings(summary, device))
        return summary


def main(
    out: options.Out = None,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Run on a CPU in the smallest size, to see that all parts work.")
    ] = False,
    parts: Annotated[str, typer.Option(help="Parts to run, with commas between them; by default all.")] = "",
) -> None:
    """Check and measure on a GPU."""
    run(out, rehearse=rehearse, parts=[part.strip() for part in parts.split(",") if part.strip()])
