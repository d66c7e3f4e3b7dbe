"""Collect the published claims that were tested into one page, `docs/claims.md`.

`python -m recipes.claims DIR [DIR ...]` reads the `claims.json` and `circumstances.json` that the recipes
`block_gain`, `budgets`, `optimal_rate`, `stopping`, `sharing`, `marginals` and `pearl` wrote, and makes one row per
claim and run. Why ours differs from the paper's is in `REASONS`, which people write.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider import InputError
from recipes.record import write
from recipes.report import table

PAGE = Path(__file__).parent.parent / "docs" / "claims.md"
VERDICTS = {True: "yes", False: "no", None: "undecided"}

REASONS: dict[str, str] = {
    "TETRIS gives more tokens per second": (
        "every request drafts two tokens more than it may verify, and here a draft forward costs a sixth of the "
        "target's and verifying more tokens costs little, so that there is hardly a budget to share; the paper "
        "verifies on 33B to 405B models whose batches are bound by arithmetic"
    ),
    "TETRIS accepts more": (
        "the criterion is the lossless one, which may not look at the token that it judges; the paper's own, "
        "which does, is refused above temperature 0"
    ),
    "A tree over per-position rows emits more tokens per step than the chain at temperature 1": (
        "chosen nodes are accepted only where the target draws them, and the rows of a draft model beyond its "
        "likeliest chain belong to another context; at temperature 1 that chain is left early. A block-diffusion "
        "drafter's rows are marginals"
    ),
    "A tree over per-position rows emits more tokens per second": (
        "the chain's draft forwards, one per depth, are paid by the tree too, where a block-diffusion drafter "
        "makes one; and 64 nodes cost a target of 16M parameters on a CPU more than they cost on an accelerator"
    ),
    "adaedl is faster than": (
        "AdaEDL's threshold moves by at most 0.001 a step, and an output of 64 tokens has some twenty steps, so "
        "that it stays where it began; the paper tunes where it begins. Reading one entropy per drafted token "
        "costs time too"
    ),
    "svip is faster than": (
        "the threshold is the paper's, not tuned to this pair; it drafts little, which is right at temperature 1"
    ),
    "PEARL is faster than drafting in turn at temperature 1, with": "eight prompts are too few to judge",
    "PEARL is faster than drafting in turn at temperature 0, in": (
        "half of a forward of models this small is Python, which two threads of one process take turns at, and each "
        "side has one core of two; the paper has a device per model"
    ),
    "PEARL is faster than drafting in turn at temperature 1, in": "as at temperature 0",
    "RSD-": (
        "at equal numbers of nodes a chain is deeper, and this pair's acceptance (0.6 to 0.7) is high enough for "
        "depth to be worth as much as width up to about 14 nodes; with ten prompts differences of less than ten "
        "percent are not resolved"
    ),
    "RSD-C tree, traversal": "differences of two percent need about ten times as many prompts",
    "RSD-S tree, traversal": "differences of two percent need about ten times as many prompts",
    "SpecTr (K-SEQ) emits more tokens": ("the paper's figure is for eight paths of eight tokens, 64 nodes against 8"),
    "Block verification emits more tokens per step than token verification at length": (
        "two runs draw different texts, which alone makes some six percent of noise; the estimates from traces, "
        "below, throw no coins and carry less"
    ),
    "Acceptance does not go one way": (
        "each temperature speaks its own text; the turn, if there is one, is less than the noise"
    ),
}
"""Why a figure differs from the paper's, by how the claim begins; the longest beginning that fits is taken."""


def reason(claim: str) -> str:
    """What `REASONS` has to say of a claim.

    Example:
        >>> reason("SpecTr (K-SEQ) emits more tokens per step than chain, token at equal budgets of nodes.")[:18]
        "the paper's figure"
    """
    if claim.endswith(("by one trace.", "own chains.")):
        return ""
    fitting = [start for start in REASONS if claim.startswith(start)]
    return REASONS[max(fitting, key=len)] if fitting else ""


def read(folder: Path) -> dict[str, Any]:
    """A run's record with its claims."""
    try:
        run: dict[str, Any] = json.loads((folder / "circumstances.json").read_text(encoding="utf-8"))
        return {**run, "claims": json.loads((folder / "claims.json").read_text(encoding="utf-8")), "folder": folder}
    except (OSError, ValueError) as error:
        raise InputError(f"{folder} is not the folder of a finished run: {error}") from error


def number(value: float | str | None) -> str:
    """A figure of a paper; a dash where it gives none."""
    return "-" if value is None else value if isinstance(value, str) else f"{value:g}"


def page(runs: Sequence[Mapping[str, Any]]) -> str:
    """The page."""
    lines, about = [], []
    for i, run in enumerate(runs, 1):
        made = run["circumstances"]
        given = made["arguments"]
        pair = f"{Path(given['target']).name} with {Path(given['draft']).name}"
        about.append(
            f"{i}. `{run['recipe']}`: {pair}, prompts: {given['num_prompts']}, seeds: {given['seeds']}, "
            f"tokens: at most {given['max_new_tokens']}; {made['cpu']}, {made['threads']} threads, torch "
            f"{made['versions']['torch']}, commit {str(made['commit'])[:10]}"
            f"{' with uncommitted changes' if made['uncommitted_changes'] else ''}, {made['date']}."
        )
        for claim in run["claims"]:
            low, high = claim["interval"]
            explained = "; ".join(filter(None, (claim["note"], reason(claim["claim"]))))
            lines.append(
                [
                    claim["claim"],
                    f"[{claim['paper']}]({claim['url']})",
                    number(claim["paper_value"]),
                    f"{claim['our_value']:.3g} [{low:.3g}, {high:.3g}]",
                    claim["unit"],
                    VERDICTS[claim["holds"]],
                    i,
                    explained,
                ]
            )
    head = ("claim", "paper", "paper's figure", "ours", "unit", "holds", "run", "remarks")
    holds = [claim["holds"] for run in runs for claim in run["claims"]]
    counts = ", ".join(f"{VERDICTS[v]}: {holds.count(v)}" for v in (True, False, None))
    return (
        "# Published claims, tested\n\n"
        "Each sentence is judged on a small pair: it holds if the whole 95 % interval is on its side, does not if the "
        "whole\ninterval is on the other, and is undecided otherwise. That says nothing of the papers' own models. "
        "Written by\n`python -m recipes.claims`; the raw rows lie in each run's folder.\n\n"
        f"{counts}.\n\n{table(head, lines)}\n## Runs\n\n" + "\n".join(about) + "\n"
    )


def main(
    folders: Annotated[list[Path], typer.Argument(help="Folders that the recipes wrote.")],
    out: Annotated[Path, typer.Option(help="The page.")] = PAGE,
) -> None:
    """Collect tested claims into one page."""
    try:
        write(out, page([read(folder) for folder in folders]))
    except (InputError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(f"wrote {out}")


if __name__ == "__main__":
    typer.run(main)
