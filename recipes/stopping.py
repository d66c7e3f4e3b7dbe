"""Rules that stop drafting by entropy against every static length (AdaEDL, SVIP).

`python -m recipes stopping --out DIR` drafts chains for the block verifier at temperatures 0 and 1: `adaedl` and `svip`
choose the length, at most 16 tokens. The steps of static lengths of 1 to 16 are computed on the same texts. The claims
are about tokens per second: `--timed DIR` names a folder that `--clock` wrote, where all of them take turns. The best
static length for one half of the prompts is chosen on the other half.
"""

from collections.abc import Sequence

from outrider.bench.report import Claim, Findings, Table
from recipes import options
from recipes.inquiry.figures import HEAD, SPEED, Figures
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
QUICK = {"num_prompts": 4, "seeds": 1, "max_new_tokens": 24}


def name(length: int | str, temperature: float) -> str:
    """A method's name."""
    return f"{length if isinstance(length, str) else f'fixed {length}'} T={temperature:g}"


def methods(lengths: Sequence[int] = LENGTHS, stoppers: Sequence[str] = tuple(STOPPERS)) -> list[Method]:
    """Static lengths and rules, at both temperatures."""
    ways: list[int | str] = [*lengths, *stoppers]
    return [
        Method(
            name=name(length, t),
            length=STOPPERS[length] if isinstance(length, str) else f"fixed:{length}",
            temperature=t,
            deepest=LONGEST,
        )
        for t in TEMPERATURES
        for length in ways
    ]


def findings(figures: Figures, lengths: Sequence[int] = LENGTHS, stoppers: Sequence[str] = tuple(STOPPERS)) -> Findings:
    """The table and the claims."""
    lines: list[Sequence[object]] = []
    claims = list[Claim]()
    timed = figures.timed(name(lengths[0], TEMPERATURES[0]))
    for t in TEMPERATURES:
        static, rules = ([name(way, t) for way in ways] for ways in (lengths, stoppers))
        best = figures.best_speed(static) if timed else None
        for own in (*static, *rules):
            over = "-" if best is None else gain(figures.speed(own), best).text("+.1f")
            lines.append([*figures.cells(own), over])
        claims += _claims(figures, t, static, stoppers) if timed else []
    table = Table(head=(*HEAD, "tokens/s over the best static length, %"), lines=lines)
    return Findings(tables=[table], claims=claims)


def _claims(figures: Figures, t: float, static: Sequence[str], stoppers: Sequence[str]) -> list[Claim]:
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
                figures.claim(
                    paper,
                    f"{stopper} is faster than {words}, temperature {t:g}.",
                    gain(figures.speed(own), others),
                    rests_on=[own],
                    published=published,
                    unit=SPEED,
                    least=0.0,
                    note=note,
                )
            )
    if {"adaedl", "svip"} <= set(stoppers):
        both = [name(stopper, t) for stopper in ("adaedl", "svip")]
        sentence = f"adaedl is faster than svip, temperature {t:g}."
        faster = gain(figures.speed(both[0]), figures.speed(both[1]))
        made.append(figures.claim(ADAEDL, sentence, faster, rests_on=both, published="up to 10", unit=SPEED, least=0.0))
    return made


def inquiry(lengths: Sequence[int] = LENGTHS, stoppers: Sequence[str] = tuple(STOPPERS)) -> Inquiry:
    """Some static lengths and some rules."""
    return Inquiry(
        recipe="stopping",
        methods=methods(lengths, stoppers),
        findings=lambda figures: findings(figures, lengths, stoppers),
        lengths=[name(n, t) for t in TEMPERATURES for n in lengths],
    )


@options.with_fields(Setting, num_prompts=40, seeds=4, max_new_tokens=96, dtype="float32")
def main(setting: Setting, timed: options.Timed = None, clock: options.Clock = False) -> None:
    """Measure stopping rules against every static length."""
    inquiry().run(setting, timed=timed, clock=clock)
