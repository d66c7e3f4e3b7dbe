"""Block efficiency of chains and trees at equal numbers of verified nodes (RSD, traversal verification, SpecTr).

`python -m recipes budgets --out DIR` gives every method budgets of 6, 10, 14, 21 and 30 nodes. If a budget allows
several shapes, a pilot on other prompts picks the shape with the highest block efficiency. Verifiers that can judge the
same trees get the same shape. Independent paths share their common beginnings, so fewer nodes are verified than drawn;
the table has the number.

A row of `rows.jsonl` holds the steps that every chain would take for one text. The figures are sums of means over the
seeds of each prompt. These means are in `sums.jsonl`, which is a tenth as long.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from outrider.bench.folder import Folder, folder
from outrider.bench.report import Claim, Findings, Table
from outrider.core.types import InputError
from recipes import options
from recipes.inquiry.figures import EFFICIENCY, HEAD, Figures
from recipes.inquiry.judging import SLOTS, about, count_until_clear, nothing_whole
from recipes.inquiry.papers import Paper, gain
from recipes.inquiry.step_seconds import StepSeconds
from recipes.inquiry.trial import Bench, Method, Setting
from recipes.questions import Question

RSD = Paper(name="Jeon et al. 2024, RSD", url="https://arxiv.org/abs/2402.14160")
TRAVERSAL = Paper(name="Weng et al. 2025, traversal verification", url="https://arxiv.org/abs/2505.12398")
SPECTR = Paper(name="Sun et al. 2023, SpecTr", url="https://arxiv.org/abs/2310.15141")
BUDGETS = (6, 10, 14, 21, 30)
PILOT_PROMPTS = 8
QUICK = {"num_prompts": 4, "seeds": 1, "max_new_tokens": 16, "budgets": "6,10", "pilot_prompts": 2}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A way to spend a budget: `name` for tables, the rest for the catalog."""

    name: str
    tree: str
    depth: int


def chain(budget: int) -> list[Shape]:
    """A chain spends its budget in one way."""
    return [Shape(name=str(budget), tree="chain", depth=budget)]


BRANCHINGS = {
    6: ("2x2", "2x1x1"),
    10: ("2x2x1", "2x1x1x1x1"),
    14: ("2x2x2", "2x2x1x1"),
    21: ("3x2x1x1", "2x2x1x1x1"),
    30: ("2x2x2x2", "3x3x1x1", "3x2x1x1x1"),
}
"""Children per node by depth; constant numbers are MCSD's."""
WIDE = {
    6: ((2, 3), (3, 2)),
    10: ((2, 5), (3, 3)),
    14: ((2, 7), (3, 4)),
    21: ((3, 7), (4, 5)),
    30: ((3, 10), (5, 6)),
}
"""Width and depth of beams and of independent paths."""
REGULAR = {6: ((2, 2),), 10: ((2, 2), (10, 1)), 14: ((2, 3), (3, 2)), 21: ((2, 3), (4, 2)), 30: ((2, 4), (5, 2))}
"""Children of every node and depth."""


def gumbel(budget: int) -> list[Shape]:
    """Children drawn without replacement, with a number per depth."""
    made = []
    for b in BRANCHINGS[budget]:
        constant = len(set(b.split("x"))) == 1
        label = f"{b} (MCSD)" if constant else b
        made.append(Shape(name=label, tree=f"gumbel:branching={b}", depth=b.count("x") + 1))
    return made


def beam(budget: int) -> list[Shape]:
    """Stochastic beams."""
    return [Shape(name=f"width {w}, depth {d}", tree=f"beam:width={w}", depth=d) for w, d in WIDE[budget]]


def iid(budget: int) -> list[Shape]:
    """Independent paths."""
    return [Shape(name=f"{k} paths of {d}", tree=f"iid:num_paths={k}", depth=d) for k, d in WIDE[budget]]


def top_plus_one(budget: int) -> list[Shape]:
    """The likeliest children and one drawn."""
    return [Shape(name=f"width {w}, depth {d}", tree=f"top_plus_one:width={w}", depth=d) for w, d in REGULAR[budget]]


def dynamic(budget: int) -> list[Shape]:
    """The likeliest nodes of a tree that expands four nodes per level."""
    return [
        Shape(name=f"width 4, depth {d}", tree=f"dynamic:width=4,num_nodes={budget}", depth=d)
        for d in (4, 6)
        if d <= budget
    ]


def opt(budget: int) -> list[Shape]:
    """Trees of the largest expected acceptance."""
    return [
        Shape(name=f"threshold {t}", tree=f"opt:num_nodes={budget},threshold={t}", depth=min(budget, 10))
        for t in (0.1, 0.3)
    ]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Ways to draft of one kind, and the names of the methods by verifier. The first verifier picks the shape.

    Attributes:
        chosen: Whether the trees are chosen rather than drawn.
    """

    name: str
    shapes: Callable[[int], list[Shape]]
    names: dict[str, str]
    chosen: bool = False


FAMILIES = (
    Family(name="chain", shapes=chain, names={"token": "chain, token", "block": "chain, block"}),
    Family(name="gumbel", shapes=gumbel, names={"recursive": "RSD-C", "traversal": "RSD-C tree, traversal"}),
    Family(name="beam", shapes=beam, names={"recursive": "RSD-S", "traversal": "RSD-S tree, traversal"}),
    Family(name="iid", shapes=iid, names={"recursive": "SpecInfer", "kseq": "SpecTr (K-SEQ)"}),
    Family(name="top_plus_one", shapes=top_plus_one, names={"top_plus_one": "top plus one"}),
    Family(name="dynamic", shapes=dynamic, names={"match": "dynamic (EAGLE-2)"}, chosen=True),
    Family(name="opt", shapes=opt, names={"match": "OPT-Tree"}, chosen=True),
)


ALL_FAMILIES = ",".join(family.name for family in FAMILIES)


def chosen_families(text: str) -> list[Family]:
    """Families by name, with commas between them.

    Example:
        >>> [family.name for family in chosen_families("iid,chain")]
        ['chain', 'iid']
    """
    names = {name.strip() for name in text.split(",")}
    known = [family.name for family in FAMILIES]
    if not names <= set(known):
        raise InputError(f"families must be some of {', '.join(known)}, got {text!r}")
    return [family for family in FAMILIES if family.name in names]


def method(family: Family, verifier: str, shape: Shape, budget: int, temperature: float) -> Method:
    """A method at a budget. Its name holds the method and the budget, not the shape."""
    return Method(
        name=f"{family.names[verifier]} @{budget}",
        tree=shape.tree,
        verifier=verifier,
        length=f"fixed:{shape.depth}",
        temperature=temperature,
        deepest=budget,
        control=shape.depth,
        labels={"way": family.names[verifier], "budget": budget, "shape": shape.name},
    )


def candidates(family: Family, budget: int, temperature: float) -> list[Method]:
    """The shapes among which the pilot chooses, with the family's first verifier."""
    made = [method(family, next(iter(family.names)), s, budget, temperature) for s in family.shapes(budget)]
    return [replace(m, name=f"{m.name} {m.labels['shape']}") for m in made]


def findings(figures: Figures, methods: Sequence[Method], budgets: Sequence[int]) -> Findings:
    """The table and the claims."""
    ordered = sorted(methods, key=lambda m: m.labels["budget"])
    lines = [[m.labels["budget"], m.labels["way"], m.labels["shape"], *figures.cells(m.name)[1:]] for m in ordered]
    head = ("budget", "method", "shape", "nodes per step", *HEAD[2:])
    return Findings(tables=[Table(head=head, lines=lines)], claims=claims(figures, methods, budgets))


COMPARISONS = (
    (RSD, "RSD-S", "RSD-C", "in most cases"),
    (RSD, "RSD-C", "SpecInfer", "in most cases"),
    (RSD, "RSD-C", "chain, token", "in most cases"),
    (RSD, "RSD-S", "chain, token", "in most cases"),
    (TRAVERSAL, "RSD-C tree, traversal", "RSD-C", 2.2),
    (TRAVERSAL, "RSD-S tree, traversal", "RSD-S", 2.4),
    (SPECTR, "SpecTr (K-SEQ)", "chain, token", 37.9),
)
"""Paper, better method, worse method, and the published gain in percent of block efficiency at temperature 1."""


def claims(figures: Figures, methods: Sequence[Method], budgets: Sequence[int]) -> list[Claim]:
    """Each comparison that was measured, as the geometric mean of the quotients at all budgets."""
    made, known = [], {method.name for method in methods}
    sizes = ", ".join(map(str, budgets))
    for paper, better, worse, published in COMPARISONS:
        names = [(f"{better} @{b}", f"{worse} @{b}") for b in budgets]
        if not known.issuperset(name for pair in names for name in pair):
            continue
        quotients = [figures.efficiency(a) / figures.efficiency(b) for a, b in names]
        ahead = sum(bool(q[0] >= 1) for q in quotients)
        both = [name for pair in names for name in pair]
        made.append(
            figures.claim(
                paper,
                f"{better} emits more tokens per step than {worse} at equal budgets of nodes.",
                gain(np.exp(np.mean(np.log(quotients), axis=0)), np.ones(len(quotients[0]))),
                rests_on=both,
                published=published,
                unit=EFFICIENCY,
                least=0.0,
                note=f"temperature {methods[0].temperature:g}; mean over budgets of {sizes} nodes; "
                f"ahead at {ahead} of {len(budgets)}",
            )
        )
    return made


def shaped(
    bench: Bench,
    place: Folder,
    pilot: Sequence[Question],
    budgets: Sequence[int],
    temperature: float,
    families: Sequence[Family],
) -> list[Method]:
    """All methods. Each family has the shape that emits most tokens per step on the pilot's prompts."""
    shapes = {(f.shapes, b): candidates(f, b, temperature) for f in families for b in budgets}
    tried = [m for each in shapes.values() if len(each) > 1 for m in each]
    seen = None
    if tried:
        jobs = [job for job in bench.batches(pilot) if job.seed == 0]
        seen = Figures(tried, bench.count(place, tried, jobs, phase="pilot"))
    chosen = []
    for f in families:
        for b in budgets:
            own = shapes[f.shapes, b]
            reached = [float(seen.efficiency(m.name)[0]) if seen and len(own) > 1 else 0.0 for m in own]
            shape = f.shapes(b)[int(np.argmax(reached))]
            chosen += [method(f, verifier, shape, b, temperature) for verifier in f.names]
    return chosen


def run(
    setting: Setting,
    budgets: Sequence[int] = BUDGETS,
    temperature: float = 1.0,
    pilot_prompts: int = PILOT_PROMPTS,
    families: Sequence[Family] = FAMILIES,
    timed: Path | None = None,
) -> list[dict[str, Any]]:
    """Choose shapes, count and write; returns the claims."""
    if not budgets or not set(budgets) <= set(BUDGETS):
        given = ", ".join(map(str, budgets)) or "none"
        raise InputError(f"budgets must be some of {', '.join(map(str, BUDGETS))}, got {given}")
    times = None if timed is None else StepSeconds.read(timed)
    more = {
        "budgets": list(budgets),
        "temperature": temperature,
        "pilot_prompts": pilot_prompts,
        "families": [family.name for family in families],
        "timed": timed,
    }
    with folder(setting.out, "budgets", {**vars(setting), **more}) as place:
        bench = Bench(setting, max_slots=SLOTS)
        questions = bench.questions(setting.num_prompts)
        pilot = bench.questions(pilot_prompts, without=questions)
        methods = shaped(bench, place, pilot, budgets, temperature, families)
        rows = count_until_clear(
            bench,
            place,
            methods,
            bench.batches(questions),
            lambda rows: claims(Figures(methods, rows), methods, budgets),
        )
        if not rows:
            raise nothing_whole(place)
        figures = Figures(methods, rows, times)
        place.keep("sums.jsonl", figures.rows)
        found = findings(figures, methods, budgets)
        return place.finish(replace(found, text=about(setting, times, figures.sums.num_prompts)))


@options.with_fields(Setting, num_prompts=32, seeds=4, max_new_tokens=96, dtype="float32")
def main(
    setting: Setting,
    timed: options.Timed = None,
    budgets: Annotated[str, typer.Option(help="Some of the budgets, with commas.")] = ",".join(map(str, BUDGETS)),
    temperature: Annotated[float, typer.Option(min=0, help="Of target and drafter.")] = 1.0,
    pilot_prompts: Annotated[int, typer.Option(min=1, help="Further prompts, for the pilot.")] = PILOT_PROMPTS,
    families: Annotated[str, typer.Option(help="Some kinds of trees, with commas.")] = ALL_FAMILIES,
) -> None:
    """Measure chains and trees at equal budgets of verified nodes."""
    chosen = options.whole_numbers("--budgets", budgets)
    run(setting, chosen, temperature, pilot_prompts, chosen_families(families), timed=timed)
