"""Tables, plots and claims of the recipe `heads`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from outrider.bench.evidence import Estimate, Row, Sums
from outrider.bench.plot import Curve, Panel
from outrider.bench.report import Findings, Table
from recipes.head_claims import claims
from recipes.head_plan import set_of
from recipes.head_runs import best_other, drafts_of, told
from recipes.head_ways import CHAIN
from recipes.trained import DEPTH, TEMPERATURES, efficiency, of

PHASES = ("trained", "made", "decoded")
"""Rows of a trained head, of a held-out prompt, and of a run."""


@dataclass(frozen=True, kw_only=True)
class OfHead:
    """The rows of a head.

    Attributes:
        made: Along texts, a row for each seed and prompt.
        trained: A row for each seed.
        decoded: Runs; none if it was not decoded with.
    """

    name: str
    made: Sequence[Row]
    trained: Sequence[Row]
    decoded: Sequence[Row]

    def efficiency(self, temperature: int, file: str | None = None) -> Estimate:
        """Tokens per step along the texts of a file of prompts, or of all."""
        rows = [row for row in self.made if file is None or set_of(row["category"]) == file]
        return Estimate.of(efficiency(Sums(rows, crossed=True), self.name, temperature))

    def acceptance(self, temperature: int) -> list[float | None]:
        """Probability that the token at each position is accepted if those before it are; None if they never are."""
        names = [f"places_{temperature}", *(f"accepted_{of(temperature, k)}" for k in range(1, DEPTH + 1))]
        sums = [sum(row[name] for row in self.made) for name in names]
        return [after / before if before else None for before, after in pairwise(sums)]

    @property
    def parameters(self) -> int:
        """Trained parameters."""
        return int(self.trained[0]["parameters"])

    @property
    def minutes(self) -> float | None:
        """Minutes of a processor that training took, the median over seeds; None if they were not measured."""
        seen = [row["seconds"] for row in self.trained if row["seconds"] is not None]
        return float(np.median(seen)) / 60 if seen else None


def findings(rows: Sequence[Row], text: str, summary: Mapping[str, Any]) -> Findings:
    """What the rows say.

    Args:
        rows: Those of the phases `trained`, `made` and `decoded`.
        text: What was done.
        summary: When and with what each head was made.
    """
    heads = heads_of(rows)
    made, decoded = ([row for row in rows if row["phase"] == phase] for phase in ("made", "decoded"))
    tables = [table(heads, temperature) for temperature in TEMPERATURES]
    panels: list[Panel] = []
    if decoded:
        tables += [drafts(heads, temperature) for temperature in TEMPERATURES]
        panels = [panel(heads, temperature) for temperature in TEMPERATURES]
    return Findings(tables=tables, panels=panels, claims=claims(made, decoded), text=text, summary=summary)


def heads_of(rows: Sequence[Row]) -> list[OfHead]:
    """The heads that were judged, in the order of their rows, each with the seeds that all its prompts have."""
    found = []
    for name in dict.fromkeys(row["method"] for row in rows if row["phase"] == "made"):
        own = {phase: [r for r in rows if (r["method"], r["phase"]) == (name, phase)] for phase in PHASES}
        found.append(OfHead(name=name, **own))
    return found


def table(heads: Sequence[OfHead], temperature: int) -> Table:
    """One line for each head: sizes, tokens per step along texts and acceptance by position, and what runs say."""
    files = list(dict.fromkeys(set_of(row["category"]) for head in heads for row in head.made))
    first = [
        "head",
        "parameters",
        "training",
        "seeds",
        *(f"tokens per step, {file}" for file in files),
        "acceptance by position",
    ]
    lines = []
    for head in heads:
        minutes = head.minutes
        lines.append(
            [
                head.name,
                f"{head.parameters / 1e6:.1f} M",
                "-" if minutes is None else f"{minutes:.0f} min",
                str(len({row["seed"] for row in head.made})),
                *(head.efficiency(temperature, file).text(".3f") for file in files),
                " ".join("-" if chance is None else f"{chance:.2f}" for chance in head.acceptance(temperature)),
                *runs(head, temperature),
            ]
        )
    return Table(
        title=f"Heads, temperature {temperature}",
        text=(
            f"Chains of {DEPTH} along what the target says to held-out prompts, with intervals over prompts and seeds. "
            "Training in minutes of one core. Acceptance of the 1st to the last token of a draft, if those before it "
            "are accepted. Behind it, runs of the engine: a draft's time in target forwards of one token, and the "
            "speed over plain decoding, with intervals over prompts; the best other draft is the one with most "
            "tokens per second on these prompts."
        ),
        head=[*first, "draft cost", "speedup, chain", "best other draft", "its tokens per step", "its speedup"],
        lines=lines,
    )


def runs(head: OfHead, temperature: int) -> list[str]:
    """The cells of a head's runs: its chain and its best other draft."""
    chain, name = told(head.decoded, CHAIN, temperature), best_other(head.decoded, temperature)
    tree = None if name is None else told(head.decoded, name, temperature)
    cells = ["-", "-"] if chain is None else [f"{chain.draft_cost:.2f}", chain.speedup.text()]
    return [*cells, *(["-"] * 3 if tree is None else [f"`{name}`", tree.efficiency.text(), tree.speedup.text()])]


def drafts(heads: Sequence[OfHead], temperature: int) -> Table:
    """One line for each draft of each head."""
    lines = []
    for head in heads:
        for draft in drafts_of(head.decoded):
            found = told(head.decoded, draft, temperature)
            if found is not None:
                figures = (
                    found.efficiency.text(),
                    f"{found.draft_cost:.2f}",
                    found.speedup.text(),
                    f"{found.rate:.1f}",
                )
                lines.append([head.name, f"`{draft}`", *figures])
    return Table(
        title=f"Runs, temperature {temperature}",
        head=("head", "draft", "tokens per step", "draft cost", "speedup", "tokens/s"),
        lines=lines,
    )


def panel(heads: Sequence[OfHead], temperature: int) -> Panel:
    """Tokens per step of runs against the cost of a draft: each head's chain, and its best other draft."""
    curves = []
    for head in heads:
        best = best_other(head.decoded, temperature)
        for draft, label in ((CHAIN, head.name), (best, f"{head.name}, {best}")):
            found = None if draft is None else told(head.decoded, draft, temperature)
            if found is not None:
                curves.append(Curve(label=label, x=[found.draft_cost], y=[found.efficiency], dashed=draft != CHAIN))
    return Panel(
        title=f"Temperature {temperature}",
        x="cost of a draft (target forwards of one token)",
        y="tokens per step",
        curves=curves,
        exact=True,
    )
