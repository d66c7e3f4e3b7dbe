"""What a recipe makes of its rows: tables, plots and claims, as Markdown and as an HTML page that stands alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment

from outrider.bench.circumstances import sentence
from outrider.bench.claims import Claim
from outrider.bench.plot import Bars, Panel, draw

VERDICTS = {True: "holds", False: "does not hold", None: "undecided"}

STYLE = """
  body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #222 }
  table { border-collapse: collapse; margin: 1em 0; font-size: 13px; display: block; overflow-x: auto }
  th, td { border: 1px solid #ccc; padding: .25em .6em; text-align: left; white-space: nowrap }
  th { background: #f3f3f3 }
  svg { max-width: 100%; height: auto }
  .holds { color: #17692c } .does-not-hold { color: #9c1c1c } .undecided { color: #666 }
  pre { font-size: 12px; background: #f7f7f7; padding: 1em; overflow-x: auto }
"""
"""How tables and plots look."""

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{{ recipe }}</title>
<style>{{ style | safe }}</style>
<h1>{{ recipe }}</h1>
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
{% if plot %}<h2>Plots</h2>{{ plot | safe }}{% endif %}
{% for table in tables %}
{% if table.title %}<h2>{{ table.title }}</h2>{% endif %}
{% if table.text %}<p>{{ table.text }}</p>{% endif %}
{% if table.head %}
<table>
  <tr>{% for cell in table.head %}<th>{{ cell }}</th>{% endfor %}</tr>
  {% for line in table.lines %}<tr>{% for cell in line %}<td>{{ cell }}</td>{% endfor %}</tr>
  {% endfor %}
</table>
{% endif %}
{% endfor %}
<h2>Raw rows</h2>
<p>{{ count }} rows in <a href="rows.jsonl">rows.jsonl</a>, beside this file. The first of them:</p>
<pre>{{ first }}</pre>
<h2>Circumstances</h2>
<pre>{{ circumstances }}</pre>
</html>
"""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table with what is to be said before it; without a head there is only the text."""

    head: Sequence[str] = ()
    lines: Sequence[Sequence[object]] = ()
    title: str = ""
    text: str = ""

    def markdown(self) -> str:
        """The table as Markdown."""
        said = [f"## {self.title}\n" if self.title else "", f"{self.text}\n" if self.text else ""]
        return "\n".join([*filter(None, said), *([table(self.head, self.lines)] if self.head else [])])


def table(head: Sequence[str], body: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What a recipe makes of its rows.

    Attributes:
        text: What was measured, in a few sentences.
        summary: The figures for programs; None where the tables and claims say all.
    """

    tables: Sequence[Table]
    panels: Sequence[Panel | Bars] = ()
    claims: Sequence[Claim] = ()
    text: str = ""
    summary: Mapping[str, Any] | None = None
    columns: int = 2

    def plot(self) -> str:
        """The panels as SVG; empty where there are none."""
        return draw(self.panels, self.columns) if self.panels else ""

    def markdown(self, recipe: str, made: Mapping[str, Any]) -> str:
        """Circumstances and tables."""
        about = "\n".join(filter(None, [sentence(recipe, made), self.text]))
        return "\n".join([about + "\n", *(each.markdown() for each in self.tables)])

    def html(self, recipe: str, made: Mapping[str, Any], *, count: int, first: str, circumstances: str) -> str:
        """A page that needs no other file.

        Args:
            count: How many rows there are.
            first: The first of them.
            circumstances: All that is known of how they came about.
        """
        page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(PAGE)
        return page.render(
            recipe=recipe,
            style=STYLE,
            about=sentence(recipe, made),
            text=self.text,
            claims=self.claims,
            verdicts=VERDICTS,
            tables=self.tables,
            plot=self.plot(),
            count=count,
            first=first,
            circumstances=circumstances,
        )

    def spoken(self, recipe: str, made: Mapping[str, Any]) -> str:
        """What is printed at the end: the claims where there are any, otherwise the tables."""
        if not self.claims:
            return self.markdown(recipe, made)
        lines = []
        for claim in self.claims:
            low, high = claim.interval
            ours = f"{claim.our_value:.3g} [{low:.3g}, {high:.3g}] {claim.unit}"
            lines.append(f"{VERDICTS[claim.holds]}: {claim.claim} (ours {ours}, paper {claim.paper_value})")
        return "\n".join(lines)
