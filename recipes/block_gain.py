"""The gain of block verification over token verification on chains, by length (Sun et al. 2024).

`python -m recipes block_gain --out DIR` lets the target write texts at temperature 1, and computes the expected number
of steps of both verifiers on them with chains of 4, 6 and 8 tokens (`outrider.theory.coverage`). The gain is a quotient
of two block efficiencies. `--timed DIR` names a folder that `--clock` wrote; then the gain in tokens per second is
computed too.
"""

from collections.abc import Sequence

from outrider.bench.evidence import IntervalEstimate
from outrider.bench.plot import Curve, Panel
from outrider.bench.report import Claim, Findings, Table
from recipes import options
from recipes.inquiry.figures import Figures
from recipes.inquiry.judging import Inquiry
from recipes.inquiry.papers import Paper, gain
from recipes.inquiry.trial import Method, Setting

PAPER = Paper(name="Sun et al. 2024, block verification", url="https://arxiv.org/abs/2403.10444")
PUBLISHED = {4: 3.46, 6: 6.19, 8: 8.30}
"""Gain in block efficiency by length, in percent: averages over eight sets, PaLM-2-S with PaLM-2-XXS."""
PUBLISHED_TIME = {8: 6.49}
"""Gain in speed, in percent."""
RULES = ("token", "block")
LENGTHS = tuple(PUBLISHED)
QUICK = {"num_prompts": 4, "seeds": 1, "max_new_tokens": 24}


def name(rule: str, length: int) -> str:
    """A method's name."""
    return f"{rule} {length}"


METHODS = tuple(
    Method(name=name(rule, n), verifier=rule, length=f"fixed:{n}", deepest=max(LENGTHS), labels={"gamma": n})
    for rule in RULES
    for n in LENGTHS
)


def findings(figures: Figures) -> Findings:
    """Tables, panels and claims."""
    lines: list[Sequence[object]] = []
    claims: list[Claim] = []
    for n in LENGTHS:
        token, block = (name(rule, n) for rule in RULES)
        reached = gain(figures.efficiency(block), figures.efficiency(token))
        timed = gain(figures.speed(block), figures.speed(token)) if figures.timed(block) else None
        for rule in (token, block):
            lines.append(
                [
                    rule,
                    IntervalEstimate.of(figures.efficiency(rule)).text(),
                    IntervalEstimate.of(figures.acceptance(rule)).text(),
                    IntervalEstimate.of(figures.speed(rule)).text(".1f") if timed else "-",
                    reached.text("+.1f") if rule == block else "",
                    timed.text("+.1f") if timed and rule == block else "",
                ]
            )
        claims += _claims(n, reached, timed, figures)
    head = ("method", "block efficiency", "acceptance", "tokens/s", "gain in efficiency, %", "gain in tokens/s, %")
    panel = Panel(
        title="Block efficiency at temperature 1",
        x="draft length (tokens)",
        y="tokens per step",
        curves=[
            Curve(label=rule, x=LENGTHS, y=[IntervalEstimate.of(figures.efficiency(name(rule, n))) for n in LENGTHS])
            for rule in RULES
        ],
    )
    return Findings(tables=[Table(head=head, lines=lines)], panels=[panel], claims=claims)


def _claims(n: int, reached: IntervalEstimate, timed: IntervalEstimate | None, figures: Figures) -> Sequence[Claim]:
    num_prompts, seconds = figures.sums.num_prompts, figures.cost()
    made = [
        PAPER.claim(
            f"Block verification emits more tokens per step than token verification, length {n}.",
            reached,
            num_prompts=num_prompts,
            seconds=seconds,
            published=PUBLISHED[n],
            unit="% of block efficiency",
            least=0.0,
        )
    ]
    if n in PUBLISHED_TIME and timed:
        made.append(
            PAPER.claim(
                f"Block verification emits more tokens per second than token verification, length {n}.",
                timed,
                num_prompts=num_prompts,
                seconds=seconds,
                published=PUBLISHED_TIME[n],
                unit="% of tokens per second",
                least=0.0,
                note="the paper's figure is the gain in its speedup over plain decoding",
            )
        )
    return made


INQUIRY = Inquiry(recipe="block_gain", methods=METHODS, findings=findings)


@options.with_setting(num_prompts=40, seeds=8, max_new_tokens=96, dtype="float32")
def main(setting: Setting, timed: options.Timed = None, clock: options.Clock = False) -> None:
    """Measure what block verification gains over token verification."""
    INQUIRY.run(setting, timed=timed, clock=clock)
