"""The gain of block verification over token verification, and the upper bound of any verifier, from recorded chains.

`python -m recipes block_trace --out DIR` decodes at temperature 1 and length 8, once with block and once with token
verification, and keeps the ratio p/q of every drafted token, accepted or not. From these ratios it computes the
expected acceptance of token verification, of block verification and of the best rule for one block, without random
decisions, for length 8 and for shorter lengths. All rules are compared on the chains of block verification's steps, so
the differences have little noise. But a run of token verification would start its steps at other places, with other
drafts. So token verification is also measured on its own chains. The recipe `block_gain` judges the claims, because it
needs no drafts and has less noise. Only this recipe has the bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from outrider.bench.evidence import IntervalEstimate, Row, Sums
from outrider.bench.folder import folder
from outrider.bench.plot import Curve, Panel
from outrider.bench.report import Findings, Table
from outrider.bench.turns import Turn, turns
from outrider.decoding.protocol import Cycle
from outrider.theory.estimators import expected_accepted
from outrider.verifiers.protocol import chains
from recipes import options
from recipes.block_gain import LENGTHS
from recipes.inquiry.papers import gain
from recipes.inquiry.trial import Bench, Method, Setting
from recipes.runs import PromptBatch, on_engine

LONGEST = max(LENGTHS)
RULES = ("token", "block", "bound")
OWN = "token, its own chains"
QUICK = {"num_prompts": 2, "seeds": 1, "max_new_tokens": 24}


def trace(bench: Bench, job: PromptBatch, rule: str) -> Float[np.ndarray, "chains gamma"]:
    """The log ratios of all full chains of one run."""
    method = Method(name=rule, verifier=rule, length=f"fixed:{LONGEST}", deepest=LONGEST)
    engine = bench.engine(method)
    seen: list[Float[np.ndarray, " gamma"]] = []

    def watch(cycle: Cycle) -> None:
        side = chains(cycle.draft, cycle.rows)
        with np.errstate(divide="ignore"):
            logs = np.log(side.p) - np.log(side.q)
        seen.extend(logs[side.lengths == LONGEST])

    engine.watch = watch
    try:
        on_engine(engine, job, bench.conditions(method))
    finally:
        engine.watch = None
    return np.array(seen).reshape(-1, LONGEST)


def expectations(bench: Bench, job: PromptBatch) -> list[Row]:
    """A row per rule and length for one prompt and seed: the tokens that the rule is expected to emit."""
    shared, own = trace(bench, job, "block"), trace(bench, job, "token")
    asked = [(f"{rule} {n}", rule, shared[:, :n]) for n in LENGTHS for rule in RULES] + [(OWN, "token", own)]
    return [
        {
            "method": name,
            "prompt": job.prompt,
            "category": job.questions[0].category,
            "seed": job.seed,
            "free_tokens": float((1 + getattr(expected_accepted(logs), rule)).sum()) if len(logs) else 0.0,
            "free_steps": len(logs),
        }
        for name, rule, logs in asked
    ]


def findings(sums: Sums) -> Findings:
    """The tables and the panel."""
    lines: list[Sequence[object]] = []
    for length in LENGTHS:
        token, block, bound = (sums.efficiency(f"{rule} {length}") for rule in RULES)
        texts = [IntervalEstimate.of(of).text(".3f") for of in (token, block, bound)]
        lines.append([length, *texts, gain(block, token).text("+.2f"), gain(bound, token).text("+.2f")])
    block, token = (sums.efficiency(name) for name in (f"block {LONGEST}", OWN))
    own = (
        f"At length {LONGEST}, each on its own chains: {IntervalEstimate.of(block).text('.3f')} tokens per step of "
        f"block verification against {IntervalEstimate.of(token).text('.3f')}, {gain(block, token).text('+.1f')} %."
    )
    head = ("length", "token", "block", "bound", "block's gain, %", "the bound's, %")
    curves = [
        Curve(label=rule, x=LENGTHS, y=[IntervalEstimate.of(sums.efficiency(f"{rule} {n}")) for n in LENGTHS])
        for rule in RULES
    ]
    panel = Panel(
        title="Expected block efficiency at temperature 1",
        x="draft length (tokens)",
        y="tokens per step",
        curves=curves,
    )
    return Findings(tables=[Table(head=head, lines=lines), Table(text=own)], panels=[panel], columns=1)


@dataclass(frozen=True, kw_only=True)
class Traced:
    """The only way that takes turns here: both rules, first one, then the other."""

    name: str = "both rules"


def run(setting: Setting) -> list[Row]:
    """Record, write, and return a row per prompt, rule and length."""
    with folder(setting.out, "block_trace", vars(setting)) as place:
        bench = Bench(setting)
        jobs = bench.jobs(bench.questions(setting.num_prompts))

        def traced(turn: Turn[Traced, PromptBatch]) -> Row:
            return {"each": expectations(bench, turn.job)}

        rows = [each for row in place.take("recorded", turns([Traced()], jobs), traced) for each in row["each"]]
        place.finish(replace(findings(Sums(rows)), text=setting.about))
        return rows


@options.with_setting(without=("dtype", "as_is"), num_prompts=40, seeds=4, max_new_tokens=96)
def main(setting: Setting) -> None:
    """Estimate what block verification gains over token verification, from traces of chains."""
    run(setting)
