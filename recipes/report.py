"""The folder that a test of claims writes: rows, tables, plot, claims and circumstances, none of them ever half."""

import io
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, TextIO

import matplotlib
import numpy as np
import typer
from matplotlib.figure import Figure
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outrider import InputError
from outrider.load import EMBEDDED_TARGET
from recipes.evidence import Claim, Estimate
from recipes.record import circumstances, write
from recipes.trial import Setting

COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Figures over a number; `dashed` for what is not the point."""

    label: str
    x: Sequence[float]
    y: Sequence[Estimate]
    dashed: bool = False


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes. Units stand in the labels."""

    title: str
    x: str
    y: str
    curves: Sequence[Curve]


def draw(panels: Sequence[Panel], columns: int = 2) -> str:
    """Panels side by side as SVG; bars are the 95 % intervals, set a little apart."""
    columns = min(columns, len(panels))
    lines = -(-len(panels) // columns)
    with matplotlib.rc_context({"svg.hashsalt": "outrider", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(7 * columns, 4.6 * lines), layout="constrained")
        for i, panel in enumerate(panels):
            axes = figure.add_subplot(lines, columns, i + 1)
            ticks = sorted({x for curve in panel.curves for x in curve.x})
            apart = min(np.diff(ticks), default=1.0) * 0.35 / max(1, len(panel.curves))
            for k, curve in enumerate(panel.curves):
                value, low, high = (np.array([getattr(e, name) for e in curve.y]) for name in ("value", "low", "high"))
                axes.errorbar(
                    np.array(curve.x) + apart * (k - (len(panel.curves) - 1) / 2),
                    value,
                    # A quantile interval need not hold the figure itself.
                    yerr=[(value - low).clip(min=0), (high - value).clip(min=0)],
                    label=curve.label,
                    color=matplotlib.colormaps["tab10" if len(panel.curves) <= 10 else "tab20"](k),
                    marker="osD^v<>Px*"[k % 10],
                    linestyle="--" if curve.dashed else "-",
                    markersize=4,
                    linewidth=1.2,
                    elinewidth=0.8,
                    capsize=2,
                )
            axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
            if len(ticks) <= 16:
                axes.set_xticks(ticks)
            axes.grid(alpha=0.3)
            many = len(panel.curves) > 6
            axes.legend(fontsize=7, **({"loc": "upper left", "bbox_to_anchor": (1.01, 1)} if many else {}))
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def table(head: Sequence[str], body: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What a recipe makes of its rows: sections of Markdown, panels, claims."""

    tables: Sequence[str]
    panels: Sequence[Panel]
    claims: Sequence[Claim]


def record(
    setting: Setting, recipe: str, work: Callable[[TextIO, Progress], Findings], **more: object
) -> list[dict[str, Any]]:
    """Do the work, write everything to the setting's folder, and return the claims as `claims.json` has them.

    Args:
        recipe: The recipe's name, for the folder's records.
        work: Measures, writing its rows to the file that it is given.
        more: Arguments beyond the setting's.
    """
    began = circumstances({**vars(setting), "target": setting.target or EMBEDDED_TARGET, **more})
    try:
        setting.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {setting.out}: {error.strerror}; give another with --out") from error
    fresh = setting.out / "rows.jsonl.new"
    try:
        with fresh.open("w", encoding="utf-8") as file, Progress(*COLUMNS) as progress:
            findings = work(file, progress)
    except InputError:
        fresh.unlink()
        with suppress(OSError):
            setting.out.rmdir()
        raise
    fresh.replace(setting.out / "rows.jsonl")
    claims = [asdict(claim) for claim in findings.claims]
    about = (
        f"`python -m recipes.{recipe}`: {began['cpu']}, {setting.threads} threads; torch {began['versions']['torch']}, "
        f"outrider {began['versions']['outrider']} ({began['commit']}"
        f"{', with uncommitted changes' if began['uncommitted_changes'] else ''}); {began['date']}.\n"
        f"Target `{setting.target or 'embedded'}`, draft model `{setting.draft.name}`, prompts: {setting.num_prompts}, "
        f"seeds: {setting.seeds}, tokens: at most {setting.max_new_tokens}. Intervals: 95 %, bootstrap over prompts "
        "and seeds, paired between methods.\n"
    )
    end = {"recipe": recipe, "circumstances": began, "ended": circumstances({})}
    write(setting.out / "circumstances.json", json.dumps(end, indent=2) + "\n")
    write(setting.out / "table.md", "\n".join([about, *findings.tables]))
    write(setting.out / "plot.svg", draw(findings.panels))
    write(setting.out / "claims.json", json.dumps(claims, indent=2) + "\n")
    return claims


def finish(work: Callable[[], list[dict[str, Any]]]) -> None:
    """Run a recipe from the command line: print its claims, or one sentence where the input is wrong."""
    try:
        claims = work()
    except InputError as error:
        raise typer.BadParameter(str(error)) from error
    verdicts = {True: "holds", False: "does not hold", None: "undecided"}
    for claim in claims:
        low, high = claim["interval"]
        ours = f"{claim['our_value']:.3g} [{low:.3g}, {high:.3g}] {claim['unit']}"
        typer.echo(f"{verdicts[claim['holds']]}: {claim['claim']} (ours {ours}, paper {claim['paper_value']})")
