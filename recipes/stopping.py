"""Rules that stop drafting by entropy against every static length (AdaEDL, SVIP).

`python -m recipes.stopping --out DIR` drafts chains for the block verifier at temperatures 0 and 1: of each length from
1 to 16, and as long as `adaedl` and `svip` see fit, at most 16. The best static length for one half of the
prompts is the one that was best on the other half.
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

ADAEDL = Paper(name="Agrawal et al. 2024, AdaEDL", url="https://arxiv.org/abs/2410.18351")
SVIP = Paper(name="Zhang et al. 2024, SVIP", url="https://arxiv.org/abs/2411.18462")
LONGEST = 16
LENGTHS = tuple(range(1, LONGEST + 1))
STOPPERS = {
    "adaedl": f"adaedl:num_speculative_tokens={LONGEST}",
    "svip": f"svip:num_speculative_tokens={LONGEST}",
}
TEMPERATURES = (0.0, 1.0)


def name(length: int | str, temperature: float) -> str:
    """A method's name."""
    return f"{length if isinstance(length, str) else f'fixed {length}'} T={temperature:g}"


def methods(lengths: Sequence[int] = LENGTHS, stoppers: Sequence[str] = tuple(STOPPERS)) -> list[Method]:
    """Static lengths and rules, at both temperatures."""
    return [
        Method(
            name=name(length, t),
            length=STOPPERS[length] if isinstance(length, str) else f"fixed:{length}",
            temperature=t,
            deepest=LONGEST,
        )
        for t in TEMPERATURES
        for length in (*lengths, *stoppers)
    ]


def findings(sums: Sums, lengths: Sequence[int] = LENGTHS, stoppers: Sequence[str] = tuple(STOPPERS)) -> Findings:
    """Tables, panels and claims."""
    lines, panels, claims = [], [], []
    for t in TEMPERATURES:
        best = sums.best("tokens", "seconds", [name(n, t) for n in lengths])
        for length in (*lengths, *stoppers):
            own = name(length, t)
            lines.append(
                [
                    own,
                    *(Estimate.of(sums.ratio(own, field, "steps")).text() for field in ("drafted", "accepted")),
                    Estimate.of(sums.ratio(own, "accepted", "drafted")).text(),
                    Estimate.of(sums.efficiency(own)).text(),
                    Estimate.of(sums.speed(own)).text(".1f"),
                    gain(sums.speed(own), best).text("+.1f"),
                ]
            )
        for title, y, of in (
            ("Speed", "tokens per second", sums.speed),
            ("Block efficiency", "tokens per step", sums.efficiency),
        ):
            static = [Estimate.of(of(name(n, t))) for n in lengths]
            curves = [Curve(label="static", x=lengths, y=static)]
            for stopper in stoppers:
                own = name(stopper, t)
                drafted = float(sums.ratio(own, "drafted", "steps")[0])
                curves.append(Curve(label=stopper, x=[drafted], y=[Estimate.of(of(own))]))
            panels.append(Panel(title=f"{title} at temperature {t:g}", x="drafted tokens per step", y=y, curves=curves))
        claims += _claims(sums, t, lengths, stoppers)
    head = (
        "method",
        "drafted per step",
        "accepted per step",
        "acceptance",
        "block efficiency",
        "tokens/s",
        "tokens/s over the best static length, %",
    )
    return Findings(tables=[table(head, lines)], panels=panels, claims=claims)


def _claims(sums: Sums, t: float, lengths: Sequence[int], stoppers: Sequence[str]) -> list[Claim]:
    speeds = [sums.speed(name(n, t)) for n in lengths]
    best = sums.best("tokens", "seconds", [name(n, t) for n in lengths])
    mean = sum(speeds) / len(speeds)
    unit, made = "% of tokens per second", []
    for paper, stopper, published in ((ADAEDL, "adaedl", "10 to 57"), (SVIP, "svip", None)):
        if stopper not in stoppers:
            continue
        own = sums.speed(name(stopper, t))
        spread = [gain(own, speed).value for speed in speeds]
        over = f"over single lengths from {min(spread):+.1f} % to {max(spread):+.1f} %"
        made += [
            paper.claim(
                f"{stopper} is faster than the mean static length of 1 to {LONGEST} at temperature {t:g}.",
                gain(own, mean),
                over=sums,
                published=published,
                unit=unit,
                least=0.0,
                note=over,
            ),
            paper.claim(
                f"{stopper} is faster than the best static length at temperature {t:g}.",
                gain(own, best),
                over=sums,
                published=published,
                unit=unit,
                least=0.0,
                note="the static length that is best on the other half of the prompts",
            ),
        ]
    if {"adaedl", "svip"} <= set(stoppers):
        made.append(
            ADAEDL.claim(
                f"adaedl is faster than svip, another rule that needs no training, at temperature {t:g}.",
                gain(sums.speed(name("adaedl", t)), sums.speed(name("svip", t))),
                over=sums,
                published="up to 10",
                unit=unit,
                least=0.0,
            )
        )
    return made


def run(
    setting: Setting, lengths: Sequence[int] = LENGTHS, stoppers: Sequence[str] = tuple(STOPPERS)
) -> list[dict[str, Any]]:
    """Measure and write; returns the claims."""

    def work(file: TextIO, progress: Progress) -> Findings:
        bench = Bench(setting)
        jobs = bench.jobs(bench.questions(setting.num_prompts))
        rows = bench.measure("measured", methods(lengths, stoppers), jobs, file, progress)
        return findings(Sums(rows), lengths, stoppers)

    return record(setting, "stopping", work)


def main(
    out: Out,
    target: Target = None,
    draft: Draft = EMBEDDED_DRAFT,
    prompts: Prompts = PROMPTS,
    num_prompts: NumPrompts = 16,
    seeds: Seeds = 1,
    max_new_tokens: Tokens = 64,
    threads: Threads = 2,
) -> None:
    """Measure stopping rules against every static length."""
    given = dict(locals())
    finish(lambda: run(Setting(**given)))


if __name__ == "__main__":
    typer.run(main)
