"""How close the rules for several drafts come to the optimum at one node, by temperature (Hu et al. 2025).

`python -m recipes optimal_rate --out DIR` lets the target generate at temperatures 0.2 to 1.2, feeds its outputs to
both models, and takes their rows at every second token. For n = 2 and 3 drafts from such a pair of rows it computes the
probability that each rule accepts one of them, and the highest possible probability. Only the target decodes. A row of
`rows.jsonl` belongs to one output and holds the figures summed over its positions.

All figures are closed forms, except for recursive rejection of three drafts without replacement. That figure is a mean
over 16 possible first refused drafts, spread evenly over their law from a start that is drawn at every position.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
import typer
from jaxtyping import Float
from torch import Tensor

from outrider.bench.evidence import IntervalEstimate, Row, Sums
from outrider.bench.folder import Folder, folder
from outrider.bench.report import Claim, Findings, Table
from outrider.bench.turns import Turn, turns
from outrider.theory import acceptance, optimum
from recipes import options
from recipes.inquiry.judging import SLOTS, nothing_whole
from recipes.inquiry.papers import Paper, gain
from recipes.inquiry.texts import logits_along, rows_at
from recipes.inquiry.trial import Bench, Setting, whole_jobs
from recipes.label import Label
from recipes.runs import Conditions, PromptBatch, on_engine

PAPER = Paper(name="Hu et al. 2025, optimal multi-draft", url="https://arxiv.org/abs/2502.18779")
TEMPERATURES = (0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
DRAFTS = (2, 3)
REFUSED = 16
"""Number of first drafts over which recursive rejection of three drafts is averaged."""
FEW = 5.0
"""Our number for the paper's `a few percent`."""
NEAR_PAPER = (0.6, 0.8)
"""Temperatures around the paper's 0.7."""
QUICK = {"num_prompts": 4, "max_new_tokens": 6}

Rows = Float[Tensor, "positions vocab"]
Rule = Callable[[Rows, Rows, int], Float[Tensor, " positions"]]


def without_replacement(
    p: Rows, q: Rows, n: int, starts: Float[Tensor, " positions"] | None = None
) -> Float[Tensor, " positions"]:
    r"""Recursive rejection of n drafts without replacement: exact for two, unbiased for three.

    The first draft passes with probability $\sum_x \min(p, q)$. It is x and refused with probability $(q - p)_+(x)$;
    then n - 1 drafts from q without x are judged by the rest of p. The mean over x is taken at 16 points that lie
    evenly over its law after a uniform start (systematic sampling).

    Args:
        starts: The start of the points at every position, in [0, 1) of their distance; by default it is drawn.
    """
    if n <= 2:
        return acceptance.recursive_without_replacement(p, q, n)
    if starts is None:
        starts = torch.rand(len(p), dtype=p.dtype, generator=torch.Generator().manual_seed(len(p)))
    passed, over, left = torch.minimum(p, q).sum(-1), (q - p).clamp_min(0), (p - q).clamp_min(0)
    refused = over.sum(-1)
    found = passed.clone()
    for i in torch.nonzero(refused > 1e-12)[:, 0].tolist():
        points = (torch.arange(REFUSED, dtype=p.dtype) + starts[i]) / REFUSED
        refusals = torch.searchsorted(over[i].cumsum(0), points * refused[i], right=True).clamp_max(len(over[i]) - 1)
        first, counts = refusals.unique(return_counts=True)
        rest = q[i].repeat(len(first), 1).scatter(1, first[:, None], 0)
        possible = rest.sum(-1) > 0
        rest, counts = rest[possible] / rest[possible].sum(-1, keepdim=True), counts[possible]
        again = without_replacement((left[i] / left[i].sum()).repeat(len(rest), 1), rest, n - 1)
        found[i] += refused[i] * (again * counts).sum() / REFUSED
    return found


RULES: Mapping[str, Rule] = {
    "optimum with replacement": lambda p, q, n: optimum.optimal_acceptance(p, q, n, replacement=True),
    "recursive with replacement": acceptance.recursive_with_replacement,
    "K-SEQ": acceptance.kseq_acceptance,
    "optimum without replacement": lambda p, q, n: optimum.optimal_acceptance(p, q, n, replacement=False),
    "recursive without replacement": without_replacement,
    "top plus one": acceptance.top_plus_one_acceptance,
}
OPTIMUM = {
    "recursive with replacement": "optimum with replacement",
    "K-SEQ": "optimum with replacement",
    "recursive without replacement": "optimum without replacement",
    "top plus one": "optimum without replacement",
}
"""The optimum with which each rule is compared. `top plus one` draws by another law, and attains the optimum there."""


def key(rule: str, n: int) -> str:
    """A figure's name in a row."""
    return f"{rule}, n={n}"


def figures(p: Rows, q: Rows) -> dict[str, float]:
    """Acceptance of every rule, summed over positions."""
    found = {key(rule, n): float(of(p, q, n).sum()) for rule, of in RULES.items() for n in DRAFTS}
    return {"positions": len(p), "one draft": float(torch.minimum(p, q).sum()), **found}


def measure(bench: Bench, place: Folder, every: int) -> list[Row]:
    """One row per temperature, prompt and seed."""
    drafter: Any = bench.first.parts.drafter
    models = (bench.first.parts.target, drafter.lm)
    jobs = bench.batches(bench.questions(bench.setting.num_prompts))

    def run(turn: Turn[Label, PromptBatch]) -> Row:
        heat, job, began = turn.way, turn.job, time.perf_counter()
        conditions = Conditions(max_new_tokens=bench.setting.max_new_tokens, temperature=heat.value)
        made = on_engine(bench.first, job, conditions)
        each = []
        for question, output in zip(job.questions, made.tokens, strict=True):
            along = (logits_along(model, question.tokens, output)[::every] for model in models)
            p, q = (rows_at(logits, heat.value) for logits in along)
            head = {"prompt": question.id, "category": question.category, "tokens": len(output)}
            each.append({**head, **figures(p, q)})
        seconds = time.perf_counter() - began
        return {
            "method": heat.name,
            "temperature": heat.value,
            "seed": job.seed,
            "seconds": seconds,
            "each": each,
        }

    heats = Label.each(TEMPERATURES, "T={:g}")
    rows = whole_jobs(place.take("outputs", turns(heats, jobs), run, as_is=bench.setting.as_is), len(heats))
    if not rows:
        raise nothing_whole(place)
    return [{"method": row["method"], "seed": row["seed"], **each} for row in rows for each in row["each"]]


def mean(sums: Sums, name: str, temperature: float) -> Float[np.ndarray, " samples"]:
    """Mean over all positions."""
    return sums.ratio(f"T={temperature:g}", name, "positions")


def findings(sums: Sums, seconds: float) -> Findings:
    """The table and the claims."""
    lines: list[Sequence[object]] = []
    for n in DRAFTS:
        found = {rule: [IntervalEstimate.of(mean(sums, key(rule, n), t)) for t in TEMPERATURES] for rule in RULES}
        found["one draft"] = [IntervalEstimate.of(mean(sums, "one draft", t)) for t in TEMPERATURES]
        lines += [[n, rule, *(each.text(".3f") for each in figures)] for rule, figures in found.items()]
    head = ("n", "rule", *(f"T={t:g}" for t in TEMPERATURES))
    return Findings(tables=[Table(head=head, lines=lines)], claims=claims(sums, seconds))


def claims(sums: Sums, seconds: float) -> list[Claim]:
    """How far each rule falls short, which drafts are better, and whether acceptance turns with the temperature."""
    n = max(DRAFTS)

    def near(name: str) -> Float[np.ndarray, " samples"]:
        found: Float[np.ndarray, " samples"] = np.mean([mean(sums, key(name, n), t) for t in NEAR_PAPER], axis=0)
        return found

    where = f"{n} drafts, mean of temperatures {' and '.join(map(str, NEAR_PAPER))}; the paper's is 0.7"
    claim = partial(PAPER.claim, num_prompts=sums.num_prompts, seconds=seconds)
    made = [
        claim(
            f"{rule[0].upper()}{rule[1:]} comes within {FEW:g} % of the {best}.",
            IntervalEstimate.of(100 * (1 - near(rule) / near(best))),
            published="a few",
            unit="% below the optimum",
            most=FEW,
            note=where,
        )
        for rule, best in OPTIMUM.items()
        if rule != "top plus one"
    ]
    made.append(
        claim(
            "Drafts without replacement have a higher optimum than independent ones.",
            gain(near("optimum without replacement"), near("optimum with replacement")),
            published="better",
            unit="% of acceptance",
            least=0.0,
            note=where,
        )
    )
    curve = [100 * mean(sums, key("optimum without replacement", n), t) for t in TEMPERATURES]
    turns = {
        (sign, t): np.minimum(sign * (f - curve[0]), sign * (f - curve[-1]))
        for sign in (1, -1)
        for t, f in list(zip(TEMPERATURES, curve, strict=True))[1:-1]
    }
    sign, t = max(turns, key=lambda turn: turns[turn][0])
    made.append(
        claim(
            "Acceptance turns as the temperature rises.",
            IntervalEstimate.of(turns[sign, t]),
            published="a turn near 0.9",
            unit="percentage points beyond both ends",
            least=0.0,
            note=f"{'highest' if sign > 0 else 'lowest'} within the range at temperature {t:g}, "
            f"optimum of {n} drafts without replacement",
        )
    )
    return made


@options.with_fields(Setting, num_prompts=40, max_new_tokens=64, dtype="float32")
def main(
    setting: Setting, every: Annotated[int, typer.Option(min=1, help="Take every such token's rows.")] = 2
) -> list[dict[str, Any]]:
    """Compare rules for several drafts with the best rule there can be."""
    with folder(setting.out, "optimal_rate", {**vars(setting), "every": every}) as place:
        rows = measure(Bench(setting, max_slots=SLOTS), place, every)
        sums = Sums(rows)
        found = findings(sums, sum(row["seconds"] for row in place.rows))
        return place.finish(replace(found, text=replace(setting, num_prompts=sums.num_prompts).about))
