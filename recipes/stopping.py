"""Rules that stop drafting by entropy against every static length (AdaEDL, SVIP).

`python -m recipes stopping --out DIR` drafts chains for the block verifier at temperatures 0 and 1: `adaedl` and `svip`
choose the length, at most 16 tokens. The steps of static lengths of 1 to 16 are computed on the same texts. The claims
are about tokens per second: `--timed DIR` names a folder that `--clock` wrote, where all of them take turns. The best
static length for one half of the prompts is chosen on the other half.
"""

from collections.abc import Sequence

from outrider.bench.evidence import IntervalEstimate
from outrider.bench.plot import Curve, Panel
from outrider.bench.report import Claim, Findings, Table
from recipes import options
from recipes.inquiry.figures import Figure, Figures
from recipes.inquiry.judging import Inquiry
from recipes.inquiry.papers import Paper, gain
from recipes.inquiry.trial import Method, Setting

ADAEDL = Paper(name="Agrawal et al. 2024, AdaEDL", url="https://arxiv.org/abs/2410.18351")
SVIP = Paper(name="Zhang et al. 2024, SVIP", url="https://arxiv.org/abs/2411.18462")
LONGEST = 16
LENGTHS = tuple(range(1, LONGEST + 1))
STOPPERS = {
    "adaedl": f"adaedl:num_speculative_tokens={LONGEST}",
    "svip": f"svip:num_speculative_tokens={LONGEST}",
}
PUBLISHED = {"adaedl": (ADAEDL, "10 to 57"), "svip": (SVIP, None)}
TEMPERATURES = (0.0, 1.0)
UNIT = "% of tokens per second"
QUICK = {"num_prompts": 4, "seeds": 1, "max_new_tokens": 24}


def name(length: int | str, temperature: float) -> str:
    """A method's name."""
    return f"{length if isinstance(length, str) else f'fixed {length}'} T={temperature:g}"


def ways(lengths: Sequence[int], stoppers: Sequence[str]) -> list[int | str]:
    """Static lengths, then rules."""
    return [*lengths, *stoppers]


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
        for length in ways(lengths, stoppers)
    ]


def findings(figures: Figures, lengths: Sequence[int] = LENGTHS, stoppers: Sequence[str] = tuple(STOPPERS)) -> Findings:
    """Tables, panels and claims."""
    lines: list[Sequence[object]] = []
    panels, claims = [], list[Claim]()
    timed = figures.timed(name(lengths[0], TEMPERATURES[0]))
    for t in TEMPERATURES:
        best = figures.best_speed([name(n, t) for n in lengths]) if timed else None
        for length in ways(lengths, stoppers):
            own = name(length, t)
            lines.append(
                [
                    own,
                    *(
                        IntervalEstimate.of(of(own)).text()
                        for of in (figures.drafted, figures.efficiency, figures.acceptance)
                    ),
                    IntervalEstimate.of(figures.speed(own)).text(".1f") if timed else "-",
                    "-" if best is None else gain(figures.speed(own), best).text("+.1f"),
                ]
            )
        panels += _panels(figures, t, lengths, stoppers, timed)
        claims += _claims(figures, t, lengths, stoppers) if timed else []
    head = (
        "method",
        "drafted per step",
        "block efficiency",
        "acceptance",
        "tokens/s",
        "tokens/s over the best static length, %",
    )
    return Findings(tables=[Table(head=head, lines=lines)], panels=panels, claims=claims)


def _panels(figures: Figures, t: float, lengths: Sequence[int], stoppers: Sequence[str], timed: bool) -> list[Panel]:
    wanted: list[tuple[str, str, Figure]] = [("Block efficiency", "tokens per step", figures.efficiency)]
    if timed:
        wanted.append(("Speed", "tokens per second", figures.speed))
    panels = []
    for title, y, of in wanted:
        curves = [Curve(label="static", x=lengths, y=[IntervalEstimate.of(of(name(n, t))) for n in lengths])]
        for stopper in stoppers:
            own = name(stopper, t)
            curves.append(Curve(label=stopper, x=[float(figures.drafted(own)[0])], y=[IntervalEstimate.of(of(own))]))
        panels.append(Panel(title=f"{title} at temperature {t:g}", x="drafted tokens per step", y=y, curves=curves))
    return panels


def _claims(figures: Figures, t: float, lengths: Sequence[int], stoppers: Sequence[str]) -> list[Claim]:
    static = [name(n, t) for n in lengths]
    speeds = [figures.speed(method) for method in static]
    best, mean = figures.best_speed(static), sum(speeds[1:], speeds[0]) / len(speeds)
    made = []
    for stopper in stoppers:
        own, (paper, published) = name(stopper, t), PUBLISHED[stopper]
        spread = [gain(figures.speed(own), speed).value for speed in speeds]
        over = f"over single lengths from {min(spread):+.1f} % to {max(spread):+.1f} %"
        chosen = "the static length that is best on the other half of the prompts"
        for words, others, note in (
            (f"the mean of the static lengths 1 to {LONGEST}", mean, over),
            ("the best static length", best, chosen),
        ):
            made.append(
                paper.claim(
                    f"{stopper} is faster than {words}, temperature {t:g}.",
                    gain(figures.speed(own), others),
                    num_prompts=figures.sums.num_prompts,
                    seconds=figures.cost(own),
                    rests_on=[own],
                    published=published,
                    unit=UNIT,
                    least=0.0,
                    note=note,
                )
            )
    if {"adaedl", "svip"} <= set(stoppers):
        both = [name(stopper, t) for stopper in ("adaedl", "svip")]
        made.append(
            ADAEDL.claim(
                f"adaedl is faster than svip, temperature {t:g}.",
                gain(figures.speed(both[0]), figures.speed(both[1])),
                num_prompts=figures.sums.num_prompts,
                seconds=figures.cost(*both),
                rests_on=both,
                published="up to 10",
                unit=UNIT,
                least=0.0,
            )
        )
    return made


def inquiry(lengths: Sequence[int] = LENGTHS, stoppers: Sequence[str] = tuple(STOPPERS)) -> Inquiry:
    """Some static lengths and some rules."""
    return Inquiry(
        recipe="stopping",
        methods=methods(lengths, stoppers),
        findings=lambda figures: findings(figures, lengths, stoppers),
        lengths=[name(n, t) for t in TEMPERATURES for n in lengths],
    )


@options.with_setting(num_prompts=40, seeds=4, max_new_tokens=96, dtype="float32")
def main(setting: Setting, timed: options.Timed = None, clock: options.Clock = False) -> None:
    """Measure stopping rules against every static length."""
    inquiry().run(setting, timed=timed, clock=clock)
