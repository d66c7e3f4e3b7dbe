"""Collect the published claims that were tested into one page, `docs/claims.md`.

`python -m recipes claims --out docs/claims.md` reads the `claims.json` and `circumstances.json` that the recipes
`block_gain`, `budgets`, `optimal_rate`, `stopping`, `sharing`, `marginals` and `pearl` wrote to the folders of
`measurements`, and makes one row per claim, with a column for each pair. Why ours differs from the paper's is in
`REASONS`, which people write.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.bench.circumstances import ROOT
from outrider.bench.claims import FOREVER
from outrider.bench.folder import read_record, write
from outrider.bench.report import table
from outrider.types import InputError

MEASUREMENTS = ROOT / "measurements"
VERDICTS = {True: "yes", False: "no", None: "undecided"}
QUICK: dict[str, object] = {}

REASONS: dict[str, str] = {}
"""Why a figure differs from the paper's, by how the claim begins; the longest beginning that fits is taken."""
HEAD = """# Published claims, tested

Each sentence is judged on two small pairs: the embedded target with the draft model that ships with the package, and
with a second, smaller one. It holds (**yes**) if the whole 95 % interval is on its side, does not (**no**) if the whole
interval is on the other, and is **undecided** otherwise. That says nothing of the papers' own models. *Hours* is how
long this machine would have to go on, with one core, until the interval of an undecided claim left the bound out, if
the figure stayed what it is. The page is written by `python -m recipes claims`; how the figures are taken stands below
the table, and the raw rows lie in each run's folder.

"""
METHOD = """## How the figures are taken

**Tokens per step** do not depend on the clock. Lossless decoding emits texts with the target's law, whatever is
drafted. For a chain of a fixed length the rows of both models along a text say how many steps it is expected to take:
nothing is drafted and no coin is thrown (`outrider.theory.coverage`; a test shows that its mean is that of enumerated
runs). For trees and stopping rules steps are counted in runs, and held against what a chain would take for the same
texts, so that texts which happen to be easy cancel (`outrider.bench.figures`). Prompts are resampled within their
categories, the same for all methods. Methods are run with further seeds until an interval twice as wide would decide
every claim about them, or until the seeds are used up.

**Tokens per second** are tokens per step over seconds per step. Digesting the prompt, which is the same for all, is
left out. The seconds are those of timed runs, in which all methods took turns on a prompt: medians over prompts, each
run divided by how much slower than usual all methods were on its prompt (`outrider.bench.step_seconds`). They were
timed once, at the commits that stand at the end of this page.

"""


def reason(claim: str) -> str:
    """What `REASONS` has to say of a claim."""
    fitting = [start for start in REASONS if claim.startswith(start)]
    return REASONS[max(fitting, key=len)] if fitting else ""


def read(folder: Path) -> dict[str, Any]:
    """A run's record with its claims."""
    try:
        claims = json.loads((folder / "claims.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{folder} is not the folder of a finished run: {error}") from error
    return {**read_record(folder), "claims": claims, "folder": folder}


def number(value: float | str | None) -> str:
    """A figure of a paper; a dash where it gives none."""
    return "-" if value is None else value if isinstance(value, str) else f"{value:g}"


@dataclass(frozen=True, kw_only=True)
class Line:
    """A claim, with what was found on each pair; by the pair's draft model."""

    claim: str
    paper: str
    url: str
    published: float | str | None
    unit: str
    found: Mapping[str, Mapping[str, Any]]


def lines(runs: Sequence[Mapping[str, Any]]) -> list[Line]:
    """The claims of all runs, those of one paper together."""
    papers: dict[str, dict[str, dict[str, Mapping[str, Any]]]] = {}
    for run in runs:
        for claim in run["claims"]:
            papers.setdefault(claim["paper"], {}).setdefault(claim["claim"], {})[draft_of(run)] = claim
    made = []
    for claims in papers.values():
        for sentence, found in claims.items():
            first = next(iter(found.values()))
            made.append(
                Line(
                    claim=sentence,
                    paper=first["paper"],
                    url=first["url"],
                    published=first["paper_value"],
                    unit=first["unit"],
                    found=found,
                )
            )
    return made


def draft_of(run: Mapping[str, Any]) -> str:
    """The draft model that a run was made with."""
    return Path(run["circumstances"]["arguments"]["draft"]).name


def cell(claim: Mapping[str, Any] | None) -> str:
    """A verdict with its figure; hours where it is undecided."""
    if claim is None:
        return "-"
    low, high = claim["interval"]
    text = f"**{VERDICTS[claim['holds']]}** {claim['our_value']:.3g} [{low:.3g}, {high:.3g}]"
    return text if claim["holds"] is not None else f"{text}, {hours(claim.get('hours'))}"


def hours(value: float | None) -> str:
    """How much longer; whole hours, or tenths of few."""
    if value is None:
        return "hours not known"
    if value >= FOREVER / 1000:
        return "> 1000 h"
    return f"{value:.1f} h" if value < 10 else f"{value:.0f} h"


def counts(claims: Sequence[Mapping[str, Any]]) -> list[str]:
    """How many of some claims hold, do not, and are undecided."""
    holds = [claim["holds"] for claim in claims]
    return [str(holds.count(verdict)) for verdict in VERDICTS]


def page(runs: Sequence[Mapping[str, Any]]) -> str:
    """The page."""
    made = lines(runs)
    pairs = list(dict.fromkeys(draft_of(run) for run in runs))
    papers = dict.fromkeys((line.paper, line.url) for line in made)
    overview = []
    for paper, url in papers:
        own = [claim for line in made if line.paper == paper for claim in line.found.values()]
        overview.append([f"[{paper}]({url})", *counts(own)])
    everything = [claim for line in made for claim in line.found.values()]
    overview.append(["**all**", *counts(everything)])
    body = []
    remarks = []
    for i, line in enumerate(made, 1):
        cells = [cell(line.found.get(pair)) for pair in pairs]
        body.append([i, line.claim, number(line.published), line.unit, *cells])
        notes = dict.fromkeys(filter(None, [*(each["note"] for each in line.found.values()), reason(line.claim)]))
        if notes:
            remarks.append(f"{i}. {'; '.join(notes)}.")
    head = ("", "claim", "paper", "unit", *(f"with `{pair}`" for pair in pairs))
    about = [described(run) for run in runs]
    return (
        f"{HEAD}{table(('paper', 'yes', 'no', 'undecided'), overview)}\n## Claims\n\n{table(head, body)}\n{METHOD}"
        f"## Remarks, by claim\n\n{chr(10).join(remarks)}\n\n## Runs\n\n{chr(10).join(about)}\n"
    )


def described(run: Mapping[str, Any]) -> str:
    """A run in a line."""
    made, given = run["circumstances"], run["circumstances"]["arguments"]
    changed = " with uncommitted changes" if made["uncommitted_changes"] else ""
    where = Path(run["folder"])
    place = where.relative_to(ROOT) if where.is_absolute() and where.is_relative_to(ROOT) else where
    text = (
        f"- [{place}](../{place}/table.md): `{run['recipe']}`, prompts: {given['num_prompts']} of "
        f"`{Path(given['prompts']).name}`, seeds: at most {given['seeds']}, tokens: at most {given['max_new_tokens']}; "
        f"{made['cpu']}, {made['threads']} threads, torch {made['versions']['torch']}, commit "
        f"{str(made['commit'])[:10]}{changed}, {made['date'][:10]}"
    )
    timed = given.get("timed")
    if not timed or not (ROOT / timed / "circumstances.json").exists():
        return f"{text}."
    clock = read_record(ROOT / timed)["circumstances"]
    return f"{text}. Times: [{timed}](../{timed}), commit {str(clock['commit'])[:10]}, {clock['date'][:10]}."


def runs_of(measurements: Path) -> list[dict[str, Any]]:
    """The runs with claims in the folders of a folder; those with the embedded draft model first."""
    found = [read(place.parent) for place in sorted(measurements.glob("*/claims.json"))]
    return [run for run in sorted(found, key=lambda run: draft_of(run) != "draft") if run["claims"]]


def main(
    measurements: Annotated[Path, typer.Option(help="Folder of the folders that the recipes wrote.")] = MEASUREMENTS,
    out: Annotated[Path | None, typer.Option(help="The page to write; without it the page is printed.")] = None,
) -> None:
    """Collect tested claims into one page."""
    runs = runs_of(measurements)
    if not runs:
        raise InputError(f"no folder of {measurements} has claims")
    if out is None:
        typer.echo(page(runs))
    else:
        write(out, page(runs))
        typer.echo(f"wrote {out}")
