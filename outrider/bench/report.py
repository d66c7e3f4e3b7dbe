"""What a recipe makes of its rows: tables, plots and claims, as Markdown and as an HTML page that stands alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.bench.circumstances import sentence
from outrider.bench.plot import Dots, Figure, Panel, Stacks, draw

VERDICTS = {True: "holds", False: "does not hold", None: "undecided"}

STYLE = """
  body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #222;
         overflow-wrap: anywhere }
  table { border-collapse: collapse; margin: 1em 0; font-size: 13px; display: block; overflow-x: auto }
  th, td { border: 1px solid #ccc; padding: .25em .6em; text-align: left; white-space: nowrap }
  th { background: #f3f3f3 }
  svg { max-width: 100%; height: auto }
  .holds { color: #17692c } .does-not-hold { color: #9c1c1c } .undecided { color: #666 }
  pre { font-size: 12px; background: #f7f7f7; padding: 1em; overflow-x: auto }
  .verdict { font-size: 1.25em; border-left: .25em solid #0072b2; padding-left: .75em }
  .figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 28em), 1fr)); gap: 1.5em }
  figure { margin: 0 } figcaption { font-size: 13px; color: #555 } summary { cursor: pointer; font-size: 13px }
  @media print { details { display: none } figure { break-inside: avoid } }
"""
"""How tables and plots look."""

PAGE_SIZE = (5.2, 3.9)
"""Inches of a figure of a page."""

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ recipe }}</title>
<style>{{ style | safe }}</style>
<h1>{{ recipe }}</h1>
{% if verdict %}<p class="verdict">{{ verdict }}</p>{% endif %}
<p>{{ about }}</p>
{% if text %}<p>{{ text }}</p>{% endif %}
{% if claims %}
<h2>Claims</h2>
<table>
  <tr><th>claim</th><th>paper</th><th>paper's figure</th><th>ours</th><th>unit</th><th>verdict</th><th>how</th></tr>
  {% for claim in claims %}
  <tr>
    <td>{{ claim.claim }}</td><td><a href="{{ claim.url }}">{{ claim.paper }}</a></td>
    <td>{{ "-" if claim.paper_value is none else claim.paper_value }}</td>
    <td>{{ "%.3g [%.3g, %.3g]" | format(claim.our_value, *claim.interval) }}</td><td>{{ claim.unit }}</td>
    <td class="{{ verdicts[claim.holds] | replace(" ", "-") }}">{{ verdicts[claim.holds] }}</td>
    <td>{{ claim.note }}</td>
  </tr>
  {% endfor %}
</table>
{% endif %}
{% if figures %}
<h2>Plots</h2>
<div class="figures">
{% for figure in figures %}
<figure>
  {{ figure.svg | safe }}
  <figcaption>{{ figure.reading }}
  <details><summary>data</summary>
  <table>
    <tr>{% for cell in figure.data.head %}<th>{{ cell }}</th>{% endfor %}</tr>
    {% for line in figure.data.lines %}<tr>{% for cell in line %}<td>{{ cell }}</td>{% endfor %}</tr>
    {% endfor %}
  </table>
  </details></figcaption>
</figure>
{% endfor %}
</div>
{% endif %}
{% for table in tables %}
{% if table.title %}<h2>{{ table.title }}</h2>{% endif %}
{% if table.text %}<p>{{ table.text }}</p>{% endif %}
{% if table.points %}<ul>{% for point in table.points %}<li>{{ point }}</li>{% endfor %}</ul>{% endif %}
{% if table.head %}
<table>
  <tr>{% for cell in table.head %}<th>{{ cell }}</th>{% endfor %}</tr>
  {% for line in table.lines %}<tr>{% for cell in line %}<td>{{ cell }}</td>{% endfor %}</tr>
  {% endfor %}
</table>
{% endif %}
{% endfor %}
<h2>Raw rows</h2>
{% if rows %}
<p>{{ count }} rows, within this page: <a id="save" download="rows.jsonl" href="#rows">save them as JSON lines</a>.</p>
<details><summary>all rows</summary><pre id="rows"></pre></details>
<script id="data" type="application/x-ndjson">{{ rows | safe }}</script>
<script>
  const rows = document.getElementById("data").textContent.replaceAll("<\\/", "</");
  document.getElementById("rows").textContent = rows;
  document.getElementById("save").href = URL.createObjectURL(new Blob([rows], {type: "application/x-ndjson"}));
</script>
{% else %}
<p>{{ count }} rows in <a href="rows.jsonl">rows.jsonl</a>, beside this file. The first of them:</p>
<pre>{{ first }}</pre>
{% endif %}
<h2>Circumstances</h2>
<details><summary>all of them</summary><pre>{{ circumstances }}</pre></details>
</html>
"""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A published sentence, and what we found.

    Attributes:
        claim: A sentence that is true or false of a pair; without figures of ours, so that it names the claim.
        paper_value: The paper's figure, in the unit, or its words.
        interval: Our 95 % interval.
        holds: True if the whole interval is on the sentence's side, False if it is on the other, None if neither.
        note: How ours was taken, where that is not plain.
        hours: Where it is undecided, how much longer this machine would have to measure before the interval would
            leave the bound out, if the figure stayed what it is; None where that is not known.
        rests_on: Names of the methods that are compared.
        clear: Whether an interval twice as wide would leave the bound out too.
        num_prompts: How many prompts ours is taken from.
    """

    claim: str
    paper: str
    url: str
    paper_value: float | str | None
    our_value: float
    interval: tuple[float, float]
    unit: str
    holds: bool | None
    note: str = ""
    hours: float | None = None
    rests_on: tuple[str, ...] = ()
    clear: bool = False
    num_prompts: int = 0


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table with what is to be said before it; without a head there is only the text, or a list of points."""

    head: Sequence[str] = ()
    lines: Sequence[Sequence[object]] = ()
    title: str = ""
    text: str = ""
    points: Sequence[str] = ()

    def markdown(self) -> str:
        """The table as Markdown."""
        opening = [f"## {self.title}\n" if self.title else "", f"{self.text}\n" if self.text else ""]
        listed = ["".join(f"- {each}\n" for each in self.points)] if self.points else []
        return "\n".join([*filter(None, opening), *listed, *([table(self.head, self.lines)] if self.head else [])])


def table(head: Sequence[str], body: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


@dataclass(frozen=True, kw_only=True)
class PlottedFigure:
    """A figure of the page: how to read it, and its data."""

    svg: str
    reading: str
    data: Table

    @classmethod
    def of(cls, panel: Figure) -> "PlottedFigure":
        """A panel, drawn so that its words can be read on a narrow screen."""
        return cls(svg=draw([panel], 1, PAGE_SIZE), reading=panel.reading, data=data_of(panel))


def data_of(panel: Figure) -> Table:
    """The numbers that a figure shows."""
    match panel:
        case Panel():
            points = [[c.label, f"{x:g}", y.text(".4g")] for c in panel.curves for x, y in zip(c.x, c.y, strict=True)]
            return Table(head=("", panel.x, panel.y), lines=points)
        case Dots():
            lines = [
                [name, *("-" if (one := each[i]) is None else one.text(".4g") for each in panel.groups.values())]
                for i, name in enumerate(panel.names)
            ]
            return Table(head=("", *panel.groups), lines=lines)
        case Stacks():
            amounts = [
                [name, *(f"{each[i]:.4g}" for each in panel.parts.values())] for i, name in enumerate(panel.names)
            ]
            return Table(head=("", *panel.parts), lines=amounts)


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What a recipe makes of its rows.

    Attributes:
        verdict: What came out, in one sentence.
        text: What was measured, in a few sentences.
        summary: The figures for programs; None where the tables and claims say all.
    """

    tables: Sequence[Table]
    panels: Sequence[Figure] = ()
    claims: Sequence[Claim] = ()
    verdict: str = ""
    text: str = ""
    summary: Mapping[str, Any] | None = None

    def plot(self) -> str:
        """The panels as SVG; empty where there are none."""
        return draw(self.panels) if self.panels else ""

    def markdown(self, recipe: str, circumstances: Mapping[str, Any]) -> str:
        """Circumstances and tables."""
        about = "\n".join(
            filter(None, [self.verdict and f"**{self.verdict}**\n", sentence(recipe, circumstances), self.text])
        )
        return "\n".join([about + "\n", *(each.markdown() for each in self.tables)])

    def html(
        self, recipe: str, circumstances: Mapping[str, Any], *, count: int, first: str, record: str, rows: str = ""
    ) -> str:
        """A page that needs no other file.

        Args:
            count: How many rows there are.
            first: The first of them.
            circumstances: All that is known of how they came about.
            rows: All of them as JSON lines, to stand within the page; empty where they lie beside it.
        """
        from jinja2 import Environment

        page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(PAGE)
        return page.render(
            recipe=recipe,
            style=STYLE,
            about=sentence(recipe, circumstances),
            verdict=self.verdict,
            text=self.text,
            claims=self.claims,
            verdicts=VERDICTS,
            tables=self.tables,
            figures=[PlottedFigure.of(panel) for panel in self.panels],
            count=count,
            first=first,
            # No text of a script may hold the end of one.
            rows=rows.replace("</", "<\\/"),
            circumstances=record,
        )

    def spoken(self, recipe: str, circumstances: Mapping[str, Any]) -> str:
        """What is printed at the end: the claims where there are any, otherwise the tables."""
        if not self.claims:
            return self.markdown(recipe, circumstances)
        lines = []
        for claim in self.claims:
            low, high = claim.interval
            ours = f"{claim.our_value:.3g} [{low:.3g}, {high:.3g}] {claim.unit}"
            lines.append(f"{VERDICTS[claim.holds]}: {claim.claim} (ours {ours}, paper {claim.paper_value})")
        return "\n".join(lines)
