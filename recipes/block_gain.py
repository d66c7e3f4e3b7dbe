"""The gain of block verification over token verification on chains, by length (Sun et al. 2024).

`python -m recipes block_gain --out DIR` lets the target write texts at temperature 1, and computes the expected number
of steps of both verifiers on them with chains of 4, 6 and 8 tokens (`outrider.theory.coverage`). The gain is a quotient
of two block efficiencies. `--timed DIR` names a folder that `--clock` wrote; then the gain in tokens per second is
computed too.
"""

from collections.abc import Sequence

from outrider.bench.report import Claim, Findings, Table
from recipes import options
from recipes.inquiry.figures import EFFICIENCY, HEAD, SPEED, Figures
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
    """The table and the claims."""
    lines: list[Sequence[object]] = []
    claims: list[Claim] = []
    for n in LENGTHS:
        token, block = (name(rule, n) for rule in RULES)
        reached = gain(figures.efficiency(block), figures.efficiency(token))
        timed = gain(figures.speed(block), figures.speed(token)) if figures.timed(block) else None
        lines += [
            [*figures.cells(token), "", ""],
            [*figures.cells(block), reached.text("+.1f"), timed.text("+.1f") if timed else ""],
        ]
        claims.append(
            figures.claim(
                PAPER,
                f"Block verification emits more tokens per step than token verification, length {n}.",
                reached,
                published=PUBLISHED[n],
                unit=EFFICIENCY,
                least=0.0,
            )
        )
        if n in PUBLISHED_TIME and timed:
            claims.append(
                figures.claim(
                    PAPER,
                    f"Block verification emits more tokens per second than token verification, length {n}.",
                    timed,
                    published=PUBLISHED_TIME[n],
                    unit=SPEED,
                    least=0.0,
                    note="the paper's figure is the gain in its speedup over plain decoding",
                )
            )
    table = Table(head=(*HEAD, "gain in efficiency, %", "gain in tokens/s, %"), lines=lines)
    return Findings(tables=[table], claims=claims)


INQUIRY = Inquiry(recipe="block_gain", methods=METHODS, findings=findings)


@options.with_fields(Setting, num_prompts=40, seeds=8, max_new_tokens=96, dtype="float32")
def main(setting: Setting, timed: options.Timed = None, clock: options.Clock = False) -> None:
    """Measure what block verification gains over token verification."""
    INQUIRY.run(setting, timed=timed, clock=clock)
