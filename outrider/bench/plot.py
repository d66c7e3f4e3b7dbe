"""Figures over numbers, with their intervals, as SVG."""

import io
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from outrider.bench.evidence import Estimate


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Figures over a number; `dashed` for what is not the point."""

    label: str
    x: Sequence[float]
    y: Sequence[Estimate]
    dashed: bool = False


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes. Units stand in the labels.

    Attributes:
        line: A value that something promised; None draws no line.
        exact: Whether points stand where they are, without ticks of their own; otherwise curves are set apart a little.
    """

    title: str
    x: str
    y: str
    curves: Sequence[Curve]
    line: float | None = None
    exact: bool = False


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Figures side by side for each of some names.

    Attributes:
        groups: By the label of each colour, one figure per name.
    """

    title: str
    x: str
    names: Sequence[str]
    groups: dict[str, Sequence[Estimate]]


def draw(panels: Sequence[Panel | Bars], columns: int = 2) -> str:
    """Panels side by side as SVG; bars at the points are intervals, set a little apart."""
    columns = min(columns, len(panels))
    lines = -(-len(panels) // columns)
    tallest = max([4.6, *(1.5 + 0.4 * len(panel.names) for panel in panels if isinstance(panel, Bars))])
    with matplotlib.rc_context({"svg.hashsalt": "outrider", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(7 * columns, tallest * lines), layout="constrained")
        for i, panel in enumerate(panels):
            axes = figure.add_subplot(lines, columns, i + 1)
            if isinstance(panel, Bars):
                _bars(axes, panel)
            else:
                _curves(axes, panel)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _curves(axes: Axes, panel: Panel) -> None:
    ticks = sorted({x for curve in panel.curves for x in curve.x})
    apart = 0.0 if panel.exact else min(np.diff(ticks), default=1.0) * 0.35 / max(1, len(panel.curves))
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
    if panel.line is not None:
        axes.axhline(panel.line, color="grey", linestyle=":")
    axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
    if len(ticks) <= 16 and not panel.exact:
        axes.set_xticks(ticks)
    axes.grid(alpha=0.3)
    if len(panel.curves) > 6:
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1))
    else:
        axes.legend(fontsize=7)


def _bars(axes: Axes, panel: Bars) -> None:
    thick = 0.8 / len(panel.groups)
    for k, (label, figures) in enumerate(panel.groups.items()):
        value, low, high = (np.array([getattr(e, name) for e in figures]) for name in ("value", "low", "high"))
        error = [(value - low).clip(min=0), (high - value).clip(min=0)]
        axes.barh(np.arange(len(panel.names)) + thick * (k - 0.5), value, 0.95 * thick, xerr=error, label=label)
    axes.set(title=panel.title, xlabel=panel.x)
    axes.set_yticks(np.arange(len(panel.names)), list(panel.names))
    axes.legend(fontsize=7)
