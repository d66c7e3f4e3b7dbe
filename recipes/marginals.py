"""Trees over per-position rows against the chain, by budget of nodes (DDTree).

`python -m recipes marginals --out DIR` drafts six deep, as a chain and as the best prefixes of a lattice of 4, 8, 16,
32 and 64 nodes, at temperatures 0 and 1. The paper's rows are the marginals of a block-diffusion drafter. Ours are the
draft model's own rows along its likeliest chain, used for all branches. So a lattice here costs six draft calls a step,
like the chain, and off the likeliest chain its rows belong to another context. `--timed DIR` names a folder that
`--clock` wrote; then tokens per second are compared too.
"""

from collections.abc import Sequence

from outrider.bench.evidence import IntervalEstimate
from outrider.bench.plot import Curve, Panel
from outrider.bench.report import Claim, Findings, Table
from recipes import options
from recipes.inquiry.figures import Figure, Figures, Samples
from recipes.inquiry.judging import Inquiry
from recipes.inquiry.papers import Paper, gain
from recipes.inquiry.trial import Method, Setting

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
QUICK = {"num_prompts": 4, "seeds": 1, "max_new_tokens": 16}


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
        control=DEPTH,
    )
    for t in TEMPERATURES
    for budget in (CHAIN, *BUDGETS)
)


def findings(figures: Figures) -> Findings:
    """Tables, panels and claims."""
    lines: list[Sequence[object]] = []
    claims = list[Claim]()
    timed = figures.timed(name(CHAIN, 0.0))
    wanted: list[tuple[str, str, Figure]] = [("Block efficiency", "tokens per step", figures.efficiency)]
    if timed:
        wanted.append(("Speed", "tokens per second", figures.speed))
    for t in TEMPERATURES:
        chain = name(CHAIN, t)
        for budget in (CHAIN, *BUDGETS):
            own = name(budget, t)
            gains = ["" if budget == CHAIN else gain(of(own), of(chain)).text("+.1f") for _, _, of in wanted]
            lines.append(
                [
                    own,
                    IntervalEstimate.of(figures.drafted(own)).text(".1f"),
                    IntervalEstimate.of(figures.efficiency(own)).text(),
                    IntervalEstimate.of(figures.speed(own)).text(".1f") if timed else "-",
                    *gains,
                    *([] if timed else ["-"]),
                ]
            )
        claims += _claims(figures, t, timed)
    panels = []
    for title, y, of in wanted:
        curves = []
        for t in TEMPERATURES:
            trees = [IntervalEstimate.of(of(name(b, t))) for b in BUDGETS]
            curves.append(Curve(label=f"lattice, T={t:g}", x=BUDGETS, y=trees))
            curves.append(
                Curve(label=f"chain of {DEPTH}, T={t:g}", x=[DEPTH], y=[IntervalEstimate.of(of(name(CHAIN, t)))])
            )
        panels.append(Panel(title=title, x="verified nodes per step", y=y, curves=curves))
    head = ("method", "nodes per step", "block efficiency", "tokens/s", "gain in efficiency, %", "gain in tokens/s, %")
    return Findings(tables=[Table(head=head, lines=lines)], panels=panels, claims=claims)


def _claims(figures: Figures, t: float, timed: bool) -> list[Claim]:
    """The best budget against the chain."""
    trees, chain = [name(b, t) for b in BUDGETS], name(CHAIN, t)

    def claim(words: str, best: Samples, over: Samples, pair: tuple[float, float], unit: str) -> Claim:
        return PAPER.claim(
            f"A lattice emits more tokens per {words} than a chain, temperature {t:g}.",
            gain(best, over),
            num_prompts=figures.sums.num_prompts,
            seconds=figures.cost(*trees),
            rests_on=trees,
            published=round(100 * (pair[1] / pair[0] - 1), 1),
            unit=unit,
            least=0.0,
            note=NOTE,
        )

    best, over = figures.best_efficiency(trees), figures.efficiency(chain)
    made = [claim("step", best, over, PUBLISHED[t], "% of block efficiency")]
    if timed:
        best, over = figures.best_speed(trees), figures.speed(chain)
        made.append(claim("second", best, over, PUBLISHED_SPEEDUP[t], "% of tokens per second"))
    return made


INQUIRY = Inquiry(recipe="marginals", methods=METHODS, findings=findings)


@options.with_setting(num_prompts=40, seeds=4, max_new_tokens=64, dtype="float32")
def main(setting: Setting, timed: options.Timed = None, clock: options.Clock = False) -> None:
    """Measure what a tree over per-position rows gains over the chain."""
    INQUIRY.run(setting, timed=timed, clock=clock)
