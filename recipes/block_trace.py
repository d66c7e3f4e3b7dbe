"""What block verification gains over token verification, and what any rule could, from recorded traces of chains.

`python -m recipes.block_trace --out DIR` decodes at temperature 1 and length 8, once with block and once with token
verification, and keeps the ratio p/q of every drafted token, accepted or not. From these the expected acceptance of
token verification, of block verification and of the best rule for one block follows without throwing their coins, for
length 8 and for the shorter lengths that its chains begin with. Compared on the same chains, those of block
verification's steps, the rules carry little noise, but token verification's own steps start elsewhere: after other
tokens, on other drafts. So each rule is also asked about its own chains, which is what `recipes.block_gain` counts with
coins thrown.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

import numpy as np
import typer
from jaxtyping import Float
from rich.progress import Progress
from torch import Tensor

from outrider import Sampling
from outrider.dice import Dice
from outrider.load import EMBEDDED_DRAFT
from outrider.theory.estimators import expected_accepted
from outrider.types import Draft as Drafted
from outrider.types import Verdict
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.protocol import Verifier, chains
from outrider.verifiers.token import TokenVerifier
from recipes.block_gain import LENGTHS, PAPER, PUBLISHED
from recipes.evidence import Claim, Estimate, Sums, gain
from recipes.report import Curve, Findings, Panel, finish, record, table
from recipes.speed import Row
from recipes.trial import PROMPTS, Bench, Draft, Job, Method, NumPrompts, Out, Prompts, Seeds, Setting, Target, Threads
from recipes.trial import Tokens as MaxTokens

LONGEST = max(LENGTHS)
RULES = ("token", "block", "bound")
OWN = "token, its own chains"


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A rule that notes the log ratios of every full chain."""

    rule: Verifier
    seen: list[Float[np.ndarray, " gamma"]] = field(default_factory=list)

    def verify(self, draft: Drafted, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Verdict:
        side = chains(draft, target_rows)
        with np.errstate(divide="ignore"):
            logs = np.log(side.p) - np.log(side.q)
        self.seen.extend(logs[side.lengths == LONGEST])
        return self.rule.verify(draft, target_rows, dice)


def trace(bench: Bench, job: Job, rule: Verifier) -> Float[np.ndarray, "chains gamma"]:
    """One run; the log ratios of its full chains."""
    engine = bench.engine(Method(name="block", length=f"fixed:{LONGEST}", deepest=LONGEST))
    recording = Recording(rule=rule)
    engine.parts = replace(engine.parts, verifier=recording)
    engine.generate(
        [list(question.tokens) for question in job.questions],
        max_new_tokens=bench.setting.max_new_tokens,
        sampling=[Sampling(temperature=1.0, seed=job.seed)] * len(job.questions),
    )
    engine.rest()
    return np.array(recording.seen).reshape(-1, LONGEST)


def expectations(bench: Bench, job: Job) -> list[Row]:
    """Of one prompt and seed, a row per rule and length: the tokens that the rule would be expected to emit."""
    shared, own = trace(bench, job, BlockVerifier()), trace(bench, job, TokenVerifier())
    asked = [(f"{rule} {n}", rule, shared[:, :n]) for n in LENGTHS for rule in RULES] + [(OWN, "token", own)]
    return [
        {
            "method": name,
            "prompt": "+".join(question.id for question in job.questions),
            "seed": job.seed,
            "free_tokens": float((1 + getattr(expected_accepted(logs), rule)).sum()) if len(logs) else 0.0,
            "free_steps": len(logs),
        }
        for name, rule, logs in asked
    ]


def findings(sums: Sums) -> Findings:
    """Tables, panels and claims."""
    lines, claims = [], list[Claim]()
    for length in LENGTHS:
        token, block, bound = (sums.efficiency(f"{rule} {length}") for rule in RULES)
        reached, possible = gain(block, token), gain(bound, token)
        texts = [Estimate.of(of).text(".3f") for of in (token, block, bound)]
        lines.append([str(length), *texts, reached.text("+.2f"), possible.text("+.2f")])
        claims.append(
            PAPER.claim(
                f"Block verification emits more tokens per step than token verification at length {length}, by one "
                "trace.",
                reached,
                over=sums,
                published=PUBLISHED[length],
                unit="% of block efficiency",
                least=0.0,
                note="expected acceptance of both rules on the chains of block verification's steps; the bound on any "
                f"rule for one block is {possible.text('+.2f')} %",
            )
        )
    block, token = (sums.efficiency(name) for name in (f"block {LONGEST}", OWN))
    claims.append(
        PAPER.claim(
            f"Block verification emits more tokens per step than token verification at length {LONGEST}, each by the "
            "trace of its own chains.",
            gain(block, token),
            over=sums,
            published=PUBLISHED[LONGEST],
            unit="% of block efficiency",
            least=0.0,
            note=f"{Estimate.of(block).text('.3f')} tokens per step against {Estimate.of(token).text('.3f')}",
        )
    )
    head = ("length", "token", "block", "bound", "block's gain, %", "the bound's, %")
    curves = [
        Curve(label=rule, x=LENGTHS, y=[Estimate.of(sums.efficiency(f"{rule} {n}")) for n in LENGTHS]) for rule in RULES
    ]
    panel = Panel(
        title="Expected block efficiency at temperature 1",
        x="draft length (tokens)",
        y="tokens per step",
        curves=curves,
    )
    return Findings(tables=[table(head, lines)], panels=[panel], claims=claims)


def run(setting: Setting) -> list[dict[str, Any]]:
    """Measure and write; returns the claims."""

    def work(file: TextIO, progress: Progress) -> Findings:
        bench = Bench(setting)
        jobs = bench.jobs(bench.questions(setting.num_prompts))
        return findings(Sums(_rows(bench, jobs, file, progress)))

    return record(setting, "block_trace", work)


def _rows(bench: Bench, jobs: Sequence[Job], file: TextIO, progress: Progress) -> list[Row]:
    task = progress.add_task("recorded", total=len(jobs))
    rows: list[Row] = []
    for job in jobs:
        fresh = expectations(bench, job)
        rows += fresh
        file.writelines(json.dumps(each) + "\n" for each in fresh)
        progress.advance(task)
    return rows


def main(
    out: Out,
    target: Target = None,
    draft: Draft = EMBEDDED_DRAFT,
    prompts: Prompts = PROMPTS,
    num_prompts: NumPrompts = 40,
    seeds: Seeds = 4,
    max_new_tokens: MaxTokens = 96,
    threads: Threads = 2,
) -> None:
    """Estimate what block verification gains over token verification, from traces of chains."""
    given = dict(locals())
    finish(lambda: run(Setting(**given)))


if __name__ == "__main__":
    typer.run(main)
