"""How near the rules for several drafts come to the optimum at one node, by temperature (Hu et al. 2025).

`python -m recipes.optimal_rate --out DIR` lets the target speak at temperatures 0.2 to 1.2, feeds its outputs to both
models, and takes their rows at every second token. For n = 2 and 3 drafts from such a pair of rows it computes with
which probability each rule accepts one of them, and with which the best rule could. No decoding is involved but the
target's own; a row of `rows.jsonl` is one output, and holds the figures of all its positions.

All figures are closed forms but recursive rejection of three drafts without replacement, which is the mean over the
first draft that is refused; 16 of them, spread evenly over its law.
"""

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TextIO

import numpy as np
import torch
import typer
from jaxtyping import Float
from rich.progress import Progress
from torch import Tensor

from outrider import Sampling
from outrider.lm.protocol import LM, Segment
from outrider.load import EMBEDDED_DRAFT
from outrider.sampling import Prefix, to_rows
from outrider.theory import acceptance, optimum
from recipes.evidence import Claim, Estimate, Paper, Sums, gain
from recipes.report import Curve, Findings, Panel, finish, record, table
from recipes.speed import Question
from recipes.trial import PROMPTS, Bench, Draft, NumPrompts, Out, Prompts, Seeds, Setting, Target, Threads, Tokens

PAPER = Paper(name="Hu et al. 2025, optimal multi-draft", url="https://arxiv.org/abs/2502.18779")
TEMPERATURES = (0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
DRAFTS = (2, 3)
REFUSED = 16
"""First drafts over which three drafts without replacement are averaged."""
FEW = 5.0
"""What stands for the paper's `a few percent`."""
NEAR_PAPER = (0.6, 0.8)
"""Temperatures around the paper's 0.7."""

Rows = Float[Tensor, "positions vocab"]
Rule = Callable[[Rows, Rows, int], Float[Tensor, " positions"]]


def without_replacement(p: Rows, q: Rows, n: int) -> Float[Tensor, " positions"]:
    r"""Recursive rejection of n drafts without replacement: exact for two.

    The first draft passes with $\sum_x \min(p, q)$ and is refused at x with $(q - p)_+(x)$; after that, n - 1 drafts
    from q without x face what is left of p.
    """
    if n <= 2:
        return acceptance.recursive_without_replacement(p, q, n)
    passed, over, left = torch.minimum(p, q).sum(-1), (q - p).clamp_min(0), (p - q).clamp_min(0)
    refused = over.sum(-1)
    found = passed.clone()
    points = (torch.arange(REFUSED, dtype=p.dtype) + 0.5) / REFUSED
    for i in torch.nonzero(refused > 1e-12)[:, 0].tolist():
        first = torch.searchsorted(over[i].cumsum(0), points * refused[i]).clamp_max(len(over[i]) - 1)
        rest = q[i].repeat(REFUSED, 1).scatter(1, first[:, None], 0)
        rest = rest[rest.sum(-1) > 0]
        rest = rest / rest.sum(-1, keepdim=True)
        again = without_replacement((left[i] / left[i].sum()).repeat(len(rest), 1), rest, n - 1)
        found[i] += refused[i] * again.sum() / REFUSED
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
"""What each rule is held against. `top plus one` draws by another law, whose optimum it attains."""


def key(rule: str, n: int) -> str:
    """A figure's name in a row."""
    return f"{rule}, n={n}"


@torch.inference_mode()
def forced(lm: LM, question: Question, output: list[int]) -> Float[Tensor, "output vocab"]:
    """A model's logits before each token of an output."""
    slot = lm.open()
    said = [*question.tokens, *output]
    lm.extend([Segment(slot=slot, tokens=torch.tensor(said[: len(question.tokens) - 1]), logits="none")])
    lm.commit({slot: range(len(question.tokens) - 1)})
    logits = lm.extend([Segment(slot=slot, tokens=torch.tensor(said[len(question.tokens) - 1 : -1]))]).logits
    lm.release(slot)
    return logits.float().cpu()


def rows_at(logits: Float[Tensor, "positions vocab"], temperature: float) -> Rows:
    """Distributions at a temperature, in float64."""
    owners = np.zeros(len(logits), dtype=np.int64)
    return to_rows(logits.double(), owners, [Sampling(temperature=temperature)], lambda _: Prefix(prompt=[], output=[]))


def measure(bench: Bench, every: int, file: TextIO, progress: Progress) -> list[dict[str, Any]]:
    """One row per temperature, prompt and seed."""
    plain = bench.first.plain()
    target, drafter = bench.first.parts.target, bench.first.parts.drafter.lm
    jobs = bench.jobs(bench.questions(bench.setting.num_prompts))
    task = progress.add_task("outputs", total=len(jobs) * len(TEMPERATURES))
    made = []
    for job in jobs:
        [question] = job.questions
        for t in TEMPERATURES:
            sampling = Sampling(temperature=t, seed=job.seed)
            limit = bench.setting.max_new_tokens
            [output] = plain.generate([list(question.tokens)], max_new_tokens=limit, sampling=sampling)
            plain.rest()
            p, q = (rows_at(forced(lm, question, output.tokens)[::every], t) for lm in (target, drafter))
            figures = {key(rule, n): of(p, q, n).tolist() for rule, of in RULES.items() for n in DRAFTS}
            made.append(
                {
                    "method": f"T={t:g}",
                    "temperature": t,
                    "prompt": question.id,
                    "category": question.category,
                    "seed": job.seed,
                    "tokens": len(output.tokens),
                    "seconds": output.seconds,
                    "positions": len(p),
                    "one draft": float(torch.minimum(p, q).sum()),
                    **{name: sum(values) for name, values in figures.items()},
                    "per_position": figures,
                }
            )
            file.write(json.dumps(made[-1]) + "\n")
            progress.advance(task)
    return made


def mean(sums: Sums, name: str, temperature: float) -> Float[np.ndarray, " samples"]:
    """Mean over all positions."""
    return sums.ratio(f"T={temperature:g}", name, "positions")


def findings(sums: Sums) -> Findings:
    """Tables, panels and claims."""
    lines, panels = [], []
    for n in DRAFTS:
        found = {rule: [Estimate.of(mean(sums, key(rule, n), t)) for t in TEMPERATURES] for rule in RULES}
        found["one draft"] = [Estimate.of(mean(sums, "one draft", t)) for t in TEMPERATURES]
        lines += [[n, rule, *(each.text(".3f") for each in figures)] for rule, figures in found.items()]
        curves = [
            Curve(label=rule, x=TEMPERATURES, y=figures, dashed=rule not in OPTIMUM) for rule, figures in found.items()
        ]
        panels.append(
            Panel(title=f"{n} drafts at one node", x="temperature", y="probability that one is accepted", curves=curves)
        )
    head = ("n", "rule", *(f"T={t:g}" for t in TEMPERATURES))
    return Findings(tables=[table(head, lines)], panels=panels, claims=claims(sums))


def claims(sums: Sums) -> list[Claim]:
    """How far each rule falls short, which drafts are better, and whether the temperature works one way."""
    n = max(DRAFTS)

    def near(name: str) -> Float[np.ndarray, " samples"]:
        return np.mean([mean(sums, key(name, n), t) for t in NEAR_PAPER], axis=0)

    where = f"{n} drafts, mean of temperatures {' and '.join(map(str, NEAR_PAPER))}; the paper's is 0.7"
    made = [
        PAPER.claim(
            f"{rule[0].upper()}{rule[1:]} comes within {FEW:g} % of the {best}.",
            Estimate.of(100 * (1 - near(rule) / near(best))),
            over=sums,
            published="a few",
            unit="% below the optimum",
            most=FEW,
            note=where,
        )
        for rule, best in OPTIMUM.items()
        if rule != "top plus one"
    ]
    made.append(
        PAPER.claim(
            "Drafts without replacement have a higher optimum than independent ones.",
            gain(near("optimum without replacement"), near("optimum with replacement")),
            over=sums,
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
        PAPER.claim(
            "Acceptance does not go one way with temperature.",
            Estimate.of(turns[sign, t]),
            over=sums,
            published="a turn near 0.9",
            unit="percentage points beyond both ends",
            least=0.0,
            note=f"{'highest' if sign > 0 else 'lowest'} within the range at temperature {t:g}, "
            f"optimum of {n} drafts without replacement",
        )
    )
    return made


def run(setting: Setting, every: int = 2) -> list[dict[str, Any]]:
    """Measure and write; returns the claims."""

    def work(file: TextIO, progress: Progress) -> Findings:
        return findings(Sums(measure(Bench(setting), every, file, progress)))

    return record(setting, "optimal_rate", work, every=every)


def main(
    out: Out,
    target: Target = None,
    draft: Draft = EMBEDDED_DRAFT,
    prompts: Prompts = PROMPTS,
    num_prompts: NumPrompts = 32,
    seeds: Seeds = 1,
    max_new_tokens: Tokens = 64,
    threads: Threads = 2,
    every: Annotated[int, typer.Option(min=1, help="Take every such token's rows.")] = 2,
) -> None:
    """Compare rules for several drafts with the best rule there can be."""
    given = dict(locals())
    every = given.pop("every")
    finish(lambda: run(Setting(**given), every))


if __name__ == "__main__":
    typer.run(main)
