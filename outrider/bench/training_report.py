"""A page about a run of training: its curves, acceptance by position as it learns, and its settings."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment

from outrider.bench.evidence import IntervalEstimate
from outrider.bench.plot import Curve, Panel, draw
from outrider.bench.report import STYLE, Table
from outrider.core.types import InputError

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{{ name }}</title>
<style>{{ style | safe }}</style>
<h1>{{ name }}</h1>
<p>{{ text }}</p>
<h2>Curves</h2>
{{ plot | safe }}
{% for table in tables %}
<h2>{{ table.title }}</h2>
{% if table.text %}<p>{{ table.text }}</p>{% endif %}
<table>
  <tr>{% for cell in table.head %}<th>{{ cell }}</th>{% endfor %}</tr>
  {% for line in table.lines %}<tr>{% for cell in line %}<td>{{ cell }}</td>{% endfor %}</tr>
  {% endfor %}
</table>
{% endfor %}
</html>
"""
POINTS = 200
"""Most points of a curve; more are averaged."""

Line = Mapping[str, Any]


def page(name: str, lines: Sequence[Line]) -> str:
    """The page of a run, as HTML that needs no other file.

    Args:
        name: Its heading.
        lines: The run's log.

    Raises:
        InputError: The log holds no step.
    """
    steps = [line for line in lines if line["kind"] == "step"]
    watched = [line for line in lines if line["kind"] == "watch"]
    settings = next((line for line in lines if line["kind"] == "settings"), {})
    if not steps:
        raise InputError("the log holds no step, so there is nothing to report; train first")
    panels = [
        _panel("loss", "loss per learnt token", {"loss": ("loss", steps)}),
        _panel("learning rate", "learning rate", {"rate": ("rate", steps)}),
        _panel("gradient", "length of the gradient", {"norm": ("norm", steps)}),
    ]
    if watched:
        efficiency = {"temperature 1": "block_efficiency", "temperature 0": "block_efficiency_greedy"}
        curves = {label: (field, watched) for label, field in efficiency.items()}
        panels.insert(1, _panel("block efficiency on held-out texts", "tokens per step of the target", curves))
        for title, field in (("temperature 1", "accepted"), ("temperature 0", "accepted_greedy")):
            panels.append(_positions(f"acceptance by position, {title}", field, watched))
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(PAGE).render(
        name=name, style=STYLE, text=_text(steps, watched), plot=draw(panels), tables=_tables(settings, watched)
    )


def _text(steps: Sequence[Line], watched: Sequence[Line]) -> str:
    """What came out, in a few sentences."""
    text = f"{steps[-1]['step']} optimizer steps. The loss went from {steps[0]['loss']:.4f} to {steps[-1]['loss']:.4f}."
    if watched:
        first, best = watched[0], max(watched, key=lambda line: line["block_efficiency"])
        text += (
            f" Block efficiency at temperature 1 went from {first['block_efficiency']:.3f} to "
            f"{best['block_efficiency']:.3f}, reached after {best['step']} steps."
        )
    return text


def _panel(title: str, y: str, curves: Mapping[str, tuple[str, Sequence[Line]]]) -> Panel:
    drawn = [_curve(label, field, lines) for label, (field, lines) in curves.items()]
    return Panel(title=title, x="optimizer step", y=y, curves=drawn)


def _positions(title: str, field: str, watched: Sequence[Line]) -> Panel:
    """The probability that the first k draft tokens are accepted, along the run."""
    curves = []
    for k in range(len(watched[0][field])):
        lines = [{"step": line["step"], "accepted": line[field][k]} for line in watched]
        curves.append(_curve(f"first {k + 1}", "accepted", lines))
    return Panel(title=title, x="optimizer step", y="probability that the first k are accepted", curves=curves)


def _curve(label: str, field: str, lines: Sequence[Line]) -> Curve:
    """A field along the steps. Of many steps it shows means of neighbours."""
    size = -(-len(lines) // POINTS)
    x, y = [], []
    for begin in range(0, len(lines), size):
        part = lines[begin : begin + size]
        mean = sum(line[field] for line in part) / len(part)
        x.append(sum(line["step"] for line in part) / len(part))
        y.append(IntervalEstimate(value=mean, low=mean, high=mean))
    return Curve(label=label, x=x, y=y)


def _tables(settings: Line, watched: Sequence[Line]) -> list[Table]:
    """What was measured at each look, and the settings."""
    tables = []
    if watched:
        depth = len(watched[0]["accepted"])
        head = ["step", "block efficiency", *(f"first {k + 1}" for k in range(depth)), "at temperature 0"]
        lines = [
            [
                line["step"],
                f"{line['block_efficiency']:.3f}",
                *(f"{value:.3f}" for value in line["accepted"]),
                f"{line['block_efficiency_greedy']:.3f}",
            ]
            for line in watched
        ]
        tables.append(
            Table(
                title="Held-out texts",
                text="Block efficiency, and the probability that the first k draft tokens are accepted, at temperature "
                f"1, over {watched[-1]['num_places']:,} places.",
                head=head,
                lines=lines,
            )
        )
    setting_lines = [[key, value] for key, value in settings.items() if key not in ("kind", "step")]
    return [*tables, Table(title="Settings", head=["setting", "value"], lines=setting_lines)]
