"""Figures over numbers and names, with their intervals, as SVG."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from outrider.bench.evidence import IntervalEstimate
from outrider.core.inputs import needs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
else:
    # matplotlib is imported when something is drawn.
    Axes = object

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31", "#7F7F7F", "#882255")
SIZE = (7.0, 4.6)
"""Inches of one pair of axes."""
BELOW = 0.6
"""Inches between axes and the legend below them."""
NARROW = 4.0
"""Ratios whose largest is fewer times the smallest get even ticks: powers of two would be too few."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Figures over a number; `dashed` for what is not the point.

    Attributes:
        color: Number of its colour; None is its place among the curves.
    """

    label: str
    x: Sequence[float]
    y: Sequence[IntervalEstimate]
    dashed: bool = False
    color: int | None = None


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes. Units stand in the labels.

    Attributes:
        exact: Whether points stand where they are, without ticks of their own; otherwise curves are set apart a little.
        reading: How to read it, in a sentence.
    """

    title: str
    x: str
    y: str
    curves: Sequence[Curve]
    exact: bool = False
    reading: str = ""


@dataclass(frozen=True, kw_only=True)
class Dots:
    """Ratios for each of some names, each a dot with its interval, on a logarithmic scale.

    Attributes:
        groups: By the label of each colour, one ratio per name; None where there is none.
        reading: How to read it, in a sentence.
    """

    title: str
    x: str
    names: Sequence[str]
    groups: Mapping[str, Sequence[IntervalEstimate | None]]
    reading: str = ""


@dataclass(frozen=True, kw_only=True)
class Stacks:
    """Amounts that add up, for each of some names.

    Attributes:
        parts: By the label of each colour, one amount per name.
        reading: How to read it, in a sentence.
    """

    title: str
    x: str
    names: Sequence[str]
    parts: Mapping[str, Sequence[float]]
    reading: str = ""


Figure = Panel | Dots | Stacks


def draw(panels: Sequence[Figure], columns: int = 2, size: tuple[float, float] = SIZE) -> str:
    """Panels side by side as SVG; bars at the points are intervals, set a little apart.

    Args:
        size: Inches of each; what has many names is taller.

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise needs("a report with plots", "matplotlib", "bench") from error
    columns = min(columns, len(panels))
    lines = -(-len(panels) // columns)
    width, height = size
    tallest = max([height, *(1.5 + _line_height(panel) * len(panel.names) for panel in panels if _has_names(panel))])
    with matplotlib.rc_context({"svg.hashsalt": "outrider", "svg.fonttype": "none", "font.size": 9}):
        figure = Canvas(figsize=(width * columns, tallest * lines), layout="constrained")
        for i, panel in enumerate(panels):
            axes = figure.add_subplot(lines, columns, i + 1)
            match panel:
                case Dots():
                    _dots(axes, panel, tallest)
                case Stacks():
                    _stacks(axes, panel, tallest)
                case Panel():
                    _curves(axes, panel)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _has_names(panel: Figure) -> TypeGuard[Dots | Stacks]:
    return not isinstance(panel, Panel)


def _line_height(panel: Dots | Stacks) -> float:
    """Inches that one name takes."""
    return max(0.4, 0.16 * len(panel.groups)) if isinstance(panel, Dots) else 0.4


def _color(number: int, count: int) -> str:
    """A colour that people with other colour vision can tell apart (Okabe and Ito), as far as there are some."""
    if count <= len(COLORS):
        return COLORS[number]
    from matplotlib import colormaps, colors

    return str(colors.to_hex(colormaps["tab20"](number % 20)))


def _curves(axes: Axes, panel: Panel) -> None:
    ticks = sorted({x for curve in panel.curves for x in curve.x})
    offset = 0.0 if panel.exact else min(np.diff(ticks), default=1.0) * 0.35 / max(1, len(panel.curves))
    for k, curve in enumerate(panel.curves):
        value, error = _with_error(curve.y)
        axes.errorbar(
            np.array(curve.x) + offset * (k - (len(panel.curves) - 1) / 2),
            value,
            yerr=error,
            label=curve.label,
            color=_color(k if curve.color is None else curve.color, len(panel.curves)),
            marker="osD^v<>Px*"[k % 10],
            linestyle="--" if curve.dashed else "-",
            markersize=4,
            linewidth=1.2,
            elinewidth=0.8,
            capsize=2,
        )
    axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
    if len(ticks) <= 16 and (not panel.exact or all(x == int(x) for x in ticks)):
        axes.set_xticks(ticks)
    axes.grid(alpha=0.3)
    if len(panel.curves) > 6:
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1))
    else:
        axes.legend(fontsize=7)


def _dots(axes: Axes, panel: Dots, height: float) -> None:
    from matplotlib.ticker import MaxNLocator, NullLocator

    offset = 0.7 / max(1, len(panel.groups))
    for k, (label, figures) in enumerate(panel.groups.items()):
        there = [(i, each) for i, each in enumerate(figures) if each is not None]
        value, error = _with_error([each for _, each in there])
        axes.errorbar(
            value,
            np.array([i for i, _ in there]) + offset * (k - (len(panel.groups) - 1) / 2),
            xerr=error,
            label=label,
            color=_color(k, len(panel.groups)),
            marker="osD^v<>Px*"[k % 10],
            linestyle="none",
            markersize=5,
            elinewidth=1.2,
            capsize=2,
        )
    axes.axvline(1.0, color="grey", linestyle=":")
    axes.set_xscale("log", base=2)
    low, high = axes.get_xlim()
    if high < NARROW * low:
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(axis="x", alpha=0.3)
    _named(axes, panel, len(panel.groups), height)


def _stacks(axes: Axes, panel: Stacks, height: float) -> None:
    begin = np.zeros(len(panel.names))
    for k, (label, amounts) in enumerate(panel.parts.items()):
        axes.barh(np.arange(len(panel.names)), amounts, 0.6, begin, label=label, color=_color(k, len(panel.parts)))
        begin += np.array(amounts)
    _named(axes, panel, len(panel.parts), height)


def _with_error(figures: Sequence[IntervalEstimate]) -> tuple[Any, list[Any]]:
    """Figures, and how far their intervals reach to both sides; a quantile interval need not hold the figure itself."""
    value, low, high = (np.array([getattr(each, name) for each in figures]) for name in ("value", "low", "high"))
    return value, [(value - low).clip(min=0), (high - value).clip(min=0)]


def _named(axes: Axes, panel: Dots | Stacks, count: int, height: float) -> None:
    """The names, the first one on top, and a legend of `count` colours below the axes, where it hides nothing.

    Args:
        height: Inches of the panel.
    """
    axes.set(title=panel.title, xlabel=panel.x)
    axes.set_yticks(np.arange(len(panel.names)), list(panel.names))
    axes.invert_yaxis()
    axes.legend(
        fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -BELOW / height), ncols=min(3, count), frameon=False
    )
