"""Trees over per-position rows against the chain, by budget of nodes (DDTree).

`python -m recipes.marginals --out DIR` drafts six deep, as a chain and as the best prefixes of a lattice of 4, 8, 16,
32 and 64 nodes, at temperatures 0 and 1. The paper's rows are the marginals of a block-diffusion drafter; ours are the
draft model's own rows along its likeliest chain, taken as if they did not depend on the branch. So a lattice here costs
six draft calls a step, as the chain does, and beyond its first branch its rows are those of another context.
"""

from typing import Any, TextIO

import typer
from rich.progress import Progress

from outrider.load import EMBEDDED_DRAFT
from recipes.evidence import Claim, Estimate, Paper, Sums, gain
from recipes.report import Curve, Findings, Panel, finish, record, table
from recipes.trial import (
    PROMPTS,
    Bench,
    Draft,
    Method,
    NumPrompts,
    Out,
    Prompts,
    Seeds,
    Setting,
    Target,
    Threads,
    Tokens,
)

PAPER = Paper(name="Ringel and Romano 2026, DDTree", url="https://arxiv.org/abs/2604.12989")
PUBLISHED = {0.0: (7.79, 10.73), 1.0: (6.46, 9.54)}
"""By temperature, tokens per step of the chain (DFlash) and of the tree: Qwen3-8B, MATH-500, block 16."""
PUBLISHED_SPEEDUP = {0.0: (5.56, 7.52), 1.0: (4.56, 6.59)}
BUDGETS = (4, 8, 16, 32, 64)
DEPTH = 6
TEMPERATURES = tuple(PUBLISHED)
CHAIN = "chain"
NOTE = (
    "rows of a draft model along its likeliest chain, not a block-diffusion drafter's marginals; "
    "the budget that is best on the other half of the prompts"
)


def name(budget: int | str, temperature: float) -> str:
    """A method's name."""
    return f"{budget if budget == CHAIN else f'lattice {budget}'} T={temperature:g}"


METHODS = tuple(
    Method(
        name=name(budget, t),
        tree=CHAIN if budget == CHAIN else f"lattice:num_nodes={budget}",
        verifier="block" if budget == CHAIN else "match",
        length=f"fixed:{DEPTH}",
        temperature=t,
        deepest=DEPTH,
        labels={"nodes": DEPTH if budget == CHAIN else budget},
    )
    for t in TEMPERATURES
    for budget in (CHAIN, *BUDGETS)
)


def findings(sums: Sums) -> Findings:
    """Tables, panels and claims."""
    lines, panels, claims = [], [], []
    for t in TEMPERATURES:
        chain = name(CHAIN, t)
        for budget in (CHAIN, *BUDGETS):
            own = name(budget, t)
            gains = [] if budget == CHAIN else [gain(of(own), of(chain)) for of in (sums.efficiency, sums.speed)]
            lines.append(
                [
                    own,
                    Estimate.of(sums.ratio(own, "drafted", "steps")).text(".1f"),
                    Estimate.of(sums.efficiency(own)).text(),
                    Estimate.of(sums.speed(own)).text(".1f"),
                    *([each.text("+.1f") for each in gains] or ["", ""]),
                ]
            )
        claims += _claims(sums, t)
    for title, y, of in (
        ("Block efficiency", "tokens per step", sums.efficiency),
        ("Speed", "tokens per second", sums.speed),
    ):
        curves = []
        for t in TEMPERATURES:
            trees = [Estimate.of(of(name(b, t))) for b in BUDGETS]
            curves.append(Curve(label=f"lattice, T={t:g}", x=BUDGETS, y=trees))
            curves.append(Curve(label=f"chain of {DEPTH}, T={t:g}", x=[DEPTH], y=[Estimate.of(of(name(CHAIN, t)))]))
        panels.append(Panel(title=title, x="verified nodes per step", y=y, curves=curves))
    head = ("method", "nodes per step", "block efficiency", "tokens/s", "gain in efficiency, %", "gain in tokens/s, %")
    return Findings(tables=[table(head, lines)], panels=panels, claims=claims)


def _claims(sums: Sums, t: float) -> list[Claim]:
    """The best budget against the chain."""
    made = []
    for words, (over, under), pair, unit in (
        ("step", ("free_tokens", "free_steps"), PUBLISHED[t], "% of block efficiency"),
        ("second", ("tokens", "seconds"), PUBLISHED_SPEEDUP[t], "% of tokens per second"),
    ):
        made.append(
            PAPER.claim(
                f"A tree over per-position rows emits more tokens per {words} than the chain at temperature {t:g}.",
                gain(sums.best(over, under, [name(b, t) for b in BUDGETS]), sums.ratio(name(CHAIN, t), over, under)),
                over=sums,
                published=round(100 * (pair[1] / pair[0] - 1), 1),
                unit=unit,
                least=0.0,
                note=NOTE,
            )
        )
    return made


def run(setting: Setting) -> list[dict[str, Any]]:
    """Measure and write; returns the claims."""

    def work(file: TextIO, progress: Progress) -> Findings:
        bench = Bench(setting)
        jobs = bench.jobs(bench.questions(setting.num_prompts))
        return findings(Sums(bench.measure("measured", METHODS, jobs, file, progress)))

    return record(setting, "marginals", work)


def main(
    out: Out,
    target: Target = None,
    draft: Draft = EMBEDDED_DRAFT,
    prompts: Prompts = PROMPTS,
    num_prompts: NumPrompts = 20,
    seeds: Seeds = 2,
    max_new_tokens: Tokens = 64,
    threads: Threads = 2,
) -> None:
    """Measure what a tree over per-position rows gains over the chain."""
    given = dict(locals())
    finish(lambda: run(Setting(**given)))


if __name__ == "__main__":
    typer.run(main)
