"""What block verification gains over token verification on chains, by length (Sun et al. 2024).

`python -m recipes.block_gain --out DIR` runs both rules with the same draft model at temperature 1 and lengths 4, 6 and
8, on the same prompts with the same seeds, in turns. The gain is a quotient of block efficiencies, and of tokens per
second.
"""

from collections.abc import Sequence
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

PAPER = Paper(name="Sun et al. 2024, block verification", url="https://arxiv.org/abs/2403.10444")
PUBLISHED = {4: 3.46, 6: 6.19, 8: 8.30}
"""Gain in block efficiency by length, in percent: averages over eight sets, PaLM-2-S with PaLM-2-XXS."""
PUBLISHED_TIME = {8: 6.49}
"""Gain in speed, in percent."""
RULES = ("token", "block")
LENGTHS = tuple(PUBLISHED)


def name(rule: str, length: int) -> str:
    """A method's name."""
    return f"{rule} {length}"


METHODS = tuple(
    Method(name=name(rule, n), verifier=rule, length=f"fixed:{n}", deepest=max(LENGTHS), labels={"gamma": n})
    for rule in RULES
    for n in LENGTHS
)


def findings(sums: Sums) -> Findings:
    """Tables, panels and claims."""
    lines, claims = [], []
    for n in LENGTHS:
        token, block = (name(rule, n) for rule in RULES)
        reached, timed = (gain(of(block), of(token)) for of in (sums.efficiency, sums.speed))
        for rule in (token, block):
            lines.append(
                [
                    rule,
                    Estimate.of(sums.efficiency(rule)).text(),
                    Estimate.of(sums.ratio(rule, "accepted", "drafted")).text(),
                    Estimate.of(sums.speed(rule)).text(".1f"),
                    reached.text("+.1f") if rule == block else "",
                    timed.text("+.1f") if rule == block else "",
                ]
            )
        claims += _claims(n, reached, timed, sums)
    head = ("method", "block efficiency", "acceptance", "tokens/s", "gain in efficiency, %", "gain in tokens/s, %")
    panels = [
        Panel(
            title=title,
            x="draft length (tokens)",
            y=y,
            curves=[
                Curve(label=rule, x=LENGTHS, y=[Estimate.of(of(name(rule, n))) for n in LENGTHS]) for rule in RULES
            ],
        )
        for title, y, of in (
            ("Block efficiency at temperature 1", "tokens per step", sums.efficiency),
            ("Speed at temperature 1", "tokens per second", sums.speed),
        )
    ]
    return Findings(tables=[table(head, lines)], panels=panels, claims=claims)


def _claims(n: int, reached: Estimate, timed: Estimate, sums: Sums) -> Sequence[Claim]:
    made = [
        PAPER.claim(
            f"Block verification emits more tokens per step than token verification at length {n}.",
            reached,
            over=sums,
            published=PUBLISHED[n],
            unit="% of block efficiency",
            least=0.0,
        )
    ]
    if n in PUBLISHED_TIME:
        made.append(
            PAPER.claim(
                f"Block verification emits more tokens per second than token verification at length {n}.",
                timed,
                over=sums,
                published=PUBLISHED_TIME[n],
                unit="% of tokens per second",
                least=0.0,
                note="the paper's figure is the gain in its speedup over plain decoding",
            )
        )
    return made


def run(setting: Setting) -> list[dict[str, Any]]:
    """Measure and write; returns the claims."""

    def work(file: TextIO, progress: Progress) -> Findings:
        bench = Bench(setting)
        jobs = bench.jobs(bench.questions(setting.num_prompts))
        return findings(Sums(bench.measure("measured", METHODS, jobs, file, progress)))

    return record(setting, "block_gain", work)


def main(
    out: Out,
    target: Target = None,
    draft: Draft = EMBEDDED_DRAFT,
    prompts: Prompts = PROMPTS,
    num_prompts: NumPrompts = 40,
    seeds: Seeds = 4,
    max_new_tokens: Tokens = 64,
    threads: Threads = 2,
) -> None:
    """Measure what block verification gains over token verification."""
    given = dict(locals())
    finish(lambda: run(Setting(**given)))


if __name__ == "__main__":
    typer.run(main)
