"""Sharing a batch's verification budget by promise against sharing it evenly (TETRIS).

`python -m recipes.sharing --out DIR` runs batches of 4, 8 and 16 requests at temperature 1: with k draft tokens for
each request (`fixed:k`), and with k + 2 drafted for each and the k per request most promising of the whole batch
verified (`tetris`), k from 2 to 5. The criterion is the one that keeps the target's law, not the published one. End
tokens are ignored, so that every request is as long; a batch shrinks towards its end, where requests finish at
different steps.
"""

from collections.abc import Sequence
from typing import Any, TextIO

import numpy as np
import typer
from jaxtyping import Float
from rich.progress import Progress

from outrider import InputError
from outrider.load import EMBEDDED_DRAFT
from recipes.evidence import Claim, Estimate, Paper, Sums, gain
from recipes.report import Curve, Findings, Panel, finish, record, table
from recipes.speed import Question, Row
from recipes.trial import (
    PROMPTS,
    Bench,
    Draft,
    Job,
    Method,
    NumPrompts,
    Out,
    Prompts,
    Seeds,
    Setting,
    Target,
    Threads,
    Tokens,
)

PAPER = Paper(name="Wu et al. 2025, TETRIS", url="https://arxiv.org/abs/2502.15197")
BATCHES = (4, 8, 16)
LENGTHS = (2, 3, 4, 5)
EXTRA = 2
POLICIES = {"fixed": "fixed:{k}", "tetris": f"tetris:num_speculative_tokens={{k}},extra={EXTRA}"}


def name(policy: str, k: int) -> str:
    """A method's name."""
    return f"{policy} {k}"


def methods(policies: Sequence[str] = tuple(POLICIES), lengths: Sequence[int] = LENGTHS) -> list[Method]:
    """Both ways to share, for each number of verified tokens per request."""
    return [
        Method(name=name(policy, k), length=POLICIES[policy].format(k=k), deepest=max(LENGTHS) + EXTRA, labels={"k": k})
        for policy in policies
        for k in lengths
    ]


def batches(questions: Sequence[Question], size: int, seeds: int) -> list[Job]:
    """Prompts in batches, shuffled anew for each seed; what does not fill a batch is left out of that seed's."""
    jobs = []
    for seed in range(seeds):
        order = np.random.default_rng([seed, size]).permutation(len(questions)).tolist()
        chunks = [order[i : i + size] for i in range(0, len(order) - size + 1, size)]
        jobs += [Job(questions=tuple(questions[i] for i in chunk), seed=seed) for chunk in chunks]
    return jobs


def by_batch(rows: Sequence[Row]) -> dict[int, Sums]:
    """Sums for each size of batch. What is resampled are the batches, each with its seed."""
    return {
        size: Sums([{**r, "prompt": f"{r['prompt']}/{r['seed']}", "seed": 0} for r in rows if r["requests"] == size])
        for size in sorted({r["requests"] for r in rows})
    }


def worth(sums: Sums, method: str) -> Float[np.ndarray, " samples"]:
    """Accepted tokens per verified draft token."""
    return sums.ratio(method, "accepted", "drafted")


def findings(tables: dict[int, Sums], policies: Sequence[str], lengths: Sequence[int]) -> Findings:
    """Tables, panels and claims."""
    lines, panels, claims = [], [], []
    for size, sums in tables.items():
        for own, k in ((name(policy, k), k) for policy in policies for k in lengths):
            lines.append(
                [
                    size,
                    own,
                    Estimate.of(sums.ratio(own, "drafted", "steps")).text(),
                    Estimate.of(worth(sums, own)).text(),
                    Estimate.of(sums.efficiency(own)).text(),
                    Estimate.of(sums.speed(own)).text(".1f"),
                    gain(sums.speed(own), sums.speed(name("fixed", k))).text("+.1f"),
                ]
            )
        panels += [
            Panel(
                title=f"{title}, batches of {size}",
                x="verified draft tokens per request and step (k)",
                y=y,
                curves=[Curve(label=p, x=lengths, y=[Estimate.of(of(name(p, k))) for k in lengths]) for p in policies],
            )
            for title, y, of in (
                ("Speed", "tokens per second, all requests", sums.speed),
                ("Worth", "accepted per verified token", lambda m, s=sums: worth(s, m)),
            )
        ]
        if {"fixed", "tetris"} <= set(policies):
            claims += _claims(size, sums, lengths)
    head = (
        "batch",
        "method",
        "verified per step",
        "accepted per verified",
        "block efficiency",
        "tokens/s",
        "tokens/s over fixed at this k, %",
    )
    return Findings(tables=[table(head, lines)], panels=panels, claims=claims)


def _claims(size: int, sums: Sums, lengths: Sequence[int]) -> list[Claim]:
    ours, even = ([name(policy, k) for k in lengths] for policy in ("tetris", "fixed"))
    spread = [gain(sums.speed(a), sums.speed(b)).value for a, b in zip(ours, even, strict=True)]
    worths = [np.mean([worth(sums, m) for m in names], axis=0) for names in (ours, even)]
    return [
        PAPER.claim(
            f"TETRIS gives more tokens per second than the best even length, in batches of {size}.",
            gain(*(sums.best("tokens", "seconds", names) for names in (ours, even))),
            over=sums,
            published="up to 5.25",
            unit="% of tokens per second",
            least=0.0,
            note="for each the k that is best on the other half of the batches; "
            f"at equal k from {min(spread):+.1f} % to {max(spread):+.1f} %",
        ),
        PAPER.claim(
            f"TETRIS accepts more of the tokens that it verifies than an even length, in batches of {size}.",
            gain(worths[0], worths[1]),
            over=sums,
            published=None,
            unit="% of accepted per verified token",
            least=0.0,
            note=f"mean over k of {lengths[0]} to {lengths[-1]}",
        ),
    ]


def run(
    setting: Setting,
    policies: Sequence[str] = tuple(POLICIES),
    lengths: Sequence[int] = LENGTHS,
    sizes: Sequence[int] = BATCHES,
) -> list[dict[str, Any]]:
    """Measure and write; returns the claims."""
    if setting.num_prompts < max(sizes):
        raise InputError(f"num_prompts must be >= {max(sizes)}, the largest batch, got {setting.num_prompts}")

    def work(file: TextIO, progress: Progress) -> Findings:
        bench = Bench(setting, max_slots=max(sizes), ignore_eos=True)
        questions = bench.questions(setting.num_prompts)
        rows = []
        for size in sizes:
            jobs = batches(questions, size, setting.seeds)
            rows += bench.measure(f"batches of {size}", methods(policies, lengths), jobs, file, progress)
        return findings(by_batch(rows), policies, lengths)

    return record(setting, "sharing", work)


def main(
    out: Out,
    target: Target = None,
    draft: Draft = EMBEDDED_DRAFT,
    prompts: Prompts = PROMPTS,
    num_prompts: NumPrompts = 32,
    seeds: Seeds = 4,
    max_new_tokens: Tokens = 32,
    threads: Threads = 2,
) -> None:
    """Measure sharing a batch's budget by promise against sharing it evenly."""
    given = dict(locals())
    finish(lambda: run(Setting(**given)))


if __name__ == "__main__":
    typer.run(main)
