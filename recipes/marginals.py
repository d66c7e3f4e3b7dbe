"""Trees over per-position rows against the chain, by budget of nodes (DDTree).

`python -m recipes marginals --out DIR` drafts six deep, as a chain and as the best prefixes of a lattice of 4, 8, 16,
32 and 64 nodes, at temperatures 0 and 1. The paper's rows are the marginals of a block-diffusion drafter. Ours are the
draft model's own rows along its likeliest chain, used for all branches. So a lattice here costs six draft calls a step,
like the chain, and off the likeliest chain its rows belong to another context. `--timed DIR` names a folder that
`--clock` wrote; then tokens per second are compared too.
"""

from collections.abc import Sequence

from outrider.bench.report import Claim, Findings, Table
from recipes import options
from recipes.inquiry.figures import EFFICIENCY, HEAD, SPEED, Figure, Figures
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
    """The table and the claims."""
    lines: list[Sequence[object]] = []
    claims = list[Claim]()
    wanted: list[tuple[str, Figure]] = [("step", figures.efficiency)]
    if figures.timed(name(CHAIN, 0.0)):
        wanted.append(("second", figures.speed))
    for t in TEMPERATURES:
        trees, chain = [name(budget, t) for budget in BUDGETS], name(CHAIN, t)
        lines.append(figures.cells(chain))
        lines += [[*figures.cells(own), *(gain(of(own), of(chain)).text("+.1f") for _, of in wanted)] for own in trees]
        for words, of in wanted:
            pair, unit, best = (
                (PUBLISHED[t], EFFICIENCY, figures.best_efficiency(trees))
                if words == "step"
                else (PUBLISHED_SPEEDUP[t], SPEED, figures.best_speed(trees))
            )
            claims.append(
                figures.claim(
                    PAPER,
                    f"A lattice emits more tokens per {words} than a chain, temperature {t:g}.",
                    gain(best, of(chain)),
                    rests_on=trees,
                    published=round(100 * (pair[1] / pair[0] - 1), 1),
                    unit=unit,
                    least=0.0,
                    note=NOTE,
                )
            )
    head = (*HEAD, *("gain in efficiency, %", "gain in tokens/s, %")[: len(wanted)])
    width = len(head)
    table = Table(head=head, lines=[[*line, *[""] * (width - len(line))] for line in lines])
    return Findings(tables=[table], claims=claims)


INQUIRY = Inquiry(recipe="marginals", methods=METHODS, findings=findings)


@options.with_fields(Setting, num_prompts=40, seeds=4, max_new_tokens=64, dtype="float32")
def main(setting: Setting, timed: options.Timed = None, clock: options.Clock = False) -> None:
    """Measure what a tree over per-position rows gains over the chain."""
    INQUIRY.run(setting, timed=timed, clock=clock)
