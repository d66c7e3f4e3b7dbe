"""Outputs of the engine in fixed configurations, to compare before and after a change that should alter nothing.

`python -m recipes regression --out BEFORE` lets the embedded pair continue the embedded prompts in each configuration
of `CONFIGURATIONS`, at temperatures 0 and 1 with fixed seeds, and writes every output to `BEFORE/outputs.json`: its
tokens, and the drafted and accepted tokens of each step. `--against BEFORE/outputs.json` compares a new recording with
that file. It prints that all outputs are identical, or it prints the first difference and exits with status 1.
`--recorded FILE` takes that file instead of a new recording.

The models compute in float32. There, a change in the order of a sum alters an output only if a draw lies within
rounding of its threshold. Requests share batches, and their prompts have different lengths.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

import outrider
from outrider.bench.circumstances import circumstances
from outrider.bench.workloads.workload import PROMPTS
from outrider.core import files
from outrider.core.types import InputError, Sampling
from outrider.embedded import EMBEDDED_TARGET
from outrider.engine.output import Output
from outrider.engine.prompts import encode
from outrider.lm.hf.open import open_tokenizer
from recipes.questions import read_prompts

TEMPERATURES = (0.0, 1.0)
SLOTS = 8
"""Requests at once: fewer than there are prompts, so that requests join a running batch."""
QUICK = {"num_prompts": 3, "max_new_tokens": 12}

Recorded = dict[str, Any]
"""The record of one output: `tokens`, and per step `drafted`, `accepted` and `emitted`."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A combination of parts, as the catalog writes them; None stands for the default of `outrider.load`."""

    drafter: str | None = None
    tree: str = "chain"
    verifier: str | None = None
    length: str | None = "fixed:4"
    decoding: str = "step"

    @property
    def name(self) -> str:
        """Its parts, in the order of a step."""
        return " ".join((self.drafter or "model", self.tree, self.verifier or "-", self.length or "-", self.decoding))


CONFIGURATIONS = (
    Configuration(drafter="none"),
    Configuration(drafter="ngram"),
    Configuration(drafter="suffix"),
    *(Configuration(verifier=verifier) for verifier in ("token", "block", "match", "greedy_block")),
    *(
        Configuration(length=length)
        for length in ("heuristic:5", "adaedl:8", "svip:8", "planned", "tetris:num_speculative_tokens=3,extra=2")
    ),
    *(Configuration(tree="gumbel:branching=3x2x1", verifier=verifier) for verifier in ("recursive", "traversal")),
    *(Configuration(tree="beam:width=3", verifier=verifier) for verifier in ("recursive", "traversal")),
    *(Configuration(tree="iid:num_paths=3", verifier=verifier) for verifier in ("recursive", "kseq", "multipath")),
    Configuration(tree="iid:num_paths=3,dedup=true", verifier="recursive"),
    Configuration(tree="top_plus_one:width=2", verifier="top_plus_one", length="fixed:3"),
    Configuration(tree="fixed:children=3x1x1x1", verifier="recursive"),
    Configuration(tree="dynamic:width=3,num_nodes=10"),
    Configuration(tree="lattice:num_nodes=10"),
    Configuration(tree="opt:num_nodes=10"),
    Configuration(decoding="pearl:3", length=None),
)


def engine_of(configuration: Configuration) -> outrider.Engine:
    """An engine over the embedded target."""
    return outrider.load(**vars(configuration), dtype="float32", max_slots=SLOTS)


def record(
    engine: outrider.Engine, prompts: Mapping[str, Sequence[int]], temperature: float, max_new_tokens: int
) -> dict[str, Recorded]:
    """An engine's outputs by the prompt's name; the i-th prompt has seed i."""
    samplings = [Sampling(temperature=temperature, seed=seed) for seed in range(len(prompts))]
    outputs = engine.generate(list(prompts.values()), max_new_tokens=max_new_tokens, sampling=samplings)
    return {name: recorded(output) for name, output in zip(prompts, outputs, strict=True)}


def recorded(output: Output) -> Recorded:
    """The record of an output."""
    return {
        "tokens": output.tokens,
        "drafted": [step.num_draft_tokens for step in output.steps],
        "accepted": [step.num_accepted_tokens for step in output.steps],
        "emitted": [len(step.tokens) for step in output.steps],
    }


def first_difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """The first difference of two recordings, as one sentence; None if they are identical."""
    for configuration, outputs in before["outputs"].items():
        for prompt, output in outputs.items():
            other = after["outputs"].get(configuration, {}).get(prompt)
            if other is None:
                return f"{configuration}: prompt {prompt} was recorded before, and is missing now"
            if found := _first_of(output, other):
                return f"{configuration}: prompt {prompt}: {found}"
    for configuration, outputs in after["outputs"].items():
        if more := outputs.keys() - before["outputs"].get(configuration, {}).keys():
            return f"{configuration}: prompt {min(more)} is recorded now, and was not before"
    return None


def _first_of(before: Recorded, after: Recorded) -> str | None:
    """The first difference of two outputs: a token, or a step with other counts."""
    for kind, unit in (("tokens", "token"), ("drafted", "step"), ("accepted", "step"), ("emitted", "step")):
        for place, (old, new) in enumerate(zip_longest(before[kind], after[kind])):
            if old != new:
                sizes = f"{len(before[kind])} before, {len(after[kind])} now"
                return f"{kind} of {unit} {place}: {old} before, {new} now ({unit}s: {sizes})"
    return None


def run(
    num_prompts: int = 40, max_new_tokens: int = 16, configurations: Sequence[Configuration] = CONFIGURATIONS
) -> Recorded:
    """Record all configurations at all temperatures."""
    tokenizer = open_tokenizer(str(EMBEDDED_TARGET))
    given = read_prompts(PROMPTS)
    if not 1 <= num_prompts <= len(given):
        raise InputError(f"num_prompts must be in 1 .. {len(given)}, the embedded prompts, got {num_prompts}")
    # One prompt of every category, then the next one of every category, so that a few prompts are of many kinds.
    chosen = sorted(given, key=lambda prompt: int(prompt[0].rpartition("/")[2]))[:num_prompts]
    prompts = {name: encode(prompt, tokenizer) for name, _, prompt in chosen}
    outputs: dict[str, dict[str, Recorded]] = {}
    with Progress() as progress:
        task = progress.add_task("configurations", total=len(configurations) * len(TEMPERATURES))
        for configuration in configurations:
            engine = engine_of(configuration)
            for temperature in TEMPERATURES:
                name = f"{configuration.name}, temperature {temperature:g}"
                outputs[name] = record(engine, prompts, temperature, max_new_tokens)
                progress.advance(task)
    made = circumstances({"num_prompts": num_prompts, "max_new_tokens": max_new_tokens})
    return {"circumstances": made, "outputs": outputs}


def read(file: Path) -> Recorded:
    """A recording. Raises InputError if the file holds none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {file}: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("outputs"), dict):
        raise InputError(f"{file} is no recording of this recipe: it has no object `outputs`")
    return found


def main(
    out: Annotated[Path | None, typer.Option(help="Folder for outputs.json.")] = None,
    against: Annotated[Path | None, typer.Option(help="An outputs.json to compare with.")] = None,
    recorded: Annotated[Path | None, typer.Option(help="An outputs.json that stands for a new recording.")] = None,
    num_prompts: Annotated[int, typer.Option(help="How many of the embedded prompts are continued.")] = 40,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens per output.")] = 16,
) -> None:
    """Record what the engine says, and compare it with an earlier recording."""
    before = None if against is None else read(against)
    after = run(num_prompts, max_new_tokens) if recorded is None else read(recorded)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        files.replace(out / "outputs.json", (json.dumps(after) + "\n").encode())
    count = sum(map(len, after["outputs"].values()))
    if before is None:
        typer.echo(f"recorded {count} outputs of {len(after['outputs'])} configurations")
    elif found := first_difference(before, after):
        typer.echo(f"not identical; the first difference is in {found}")
        raise typer.Exit(1)
    else:
        typer.echo(f"identical: {count} outputs of {len(after['outputs'])} configurations")
