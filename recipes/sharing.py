"""Sharing a batch's verification budget by estimated acceptance, against sharing it evenly (TETRIS).

`python -m recipes sharing --out DIR` runs batches of 4, 8 and 16 requests at temperature 1. `tetris` drafts k + 2
tokens for each request, and verifies the most promising tokens of the whole batch, k per request on average, for k from
2 to 5. The steps that k draft tokens for each request (`fixed:k`) would take are computed on the same texts. The
criterion is the one that keeps the target's law, not the published one. End tokens are ignored, so that all requests
have the same length. A batch shrinks towards its end, because requests finish at different steps. `--timed DIR` names a
folder that `--clock` wrote; then tokens per second are compared too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from outrider.bench.evidence import Row
from outrider.bench.folder import folder
from outrider.bench.report import Claim, Findings, Table
from outrider.core.types import InputError
from recipes import options
from recipes.inquiry.figures import HEAD, SPEED, Figures
from recipes.inquiry.judging import about, count_until_clear, nothing_whole, seconds_table
from recipes.inquiry.papers import Paper, gain
from recipes.inquiry.step_seconds import StepSeconds
from recipes.inquiry.trial import Bench, Method, Setting
from recipes.questions import Question
from recipes.runs import PromptBatch

PAPER = Paper(name="Wu et al. 2025, TETRIS", url="https://arxiv.org/abs/2502.15197")
BATCHES = (4, 8, 16)
LENGTHS = (2, 3, 4, 5)
EXTRA = 2
POLICIES = {"fixed": "fixed:{k}", "tetris": f"tetris:num_speculative_tokens={{k}},extra={EXTRA}"}
QUICK = {"num_prompts": 16, "seeds": 1, "max_new_tokens": 12}


def name(policy: str, k: int) -> str:
    """A method's name."""
    return f"{policy} {k}"


def methods(policies: Sequence[str] = tuple(POLICIES), lengths: Sequence[int] = LENGTHS) -> list[Method]:
    """Both ways to share, for each number of verified tokens per request."""
    return [
        Method(
            name=name(policy, k),
            length=POLICIES[policy].format(k=k),
            deepest=max(LENGTHS) + EXTRA,
            labels={"k": k},
            control=k,
        )
        for policy in policies
        for k in lengths
    ]


def batches(questions: Sequence[Question], size: int, seeds: int) -> list[PromptBatch]:
    """Prompts in batches, shuffled for each seed. Prompts that do not fill a batch are left out for that seed."""
    jobs = []
    for seed in range(seeds):
        order = np.random.default_rng([seed, size]).permutation(len(questions)).tolist()
        chunks = [order[i : i + size] for i in range(0, len(order) - size + 1, size)]
        jobs += [PromptBatch(questions=tuple(questions[i] for i in chunk), seed=seed) for chunk in chunks]
    return jobs


def findings(tables: Mapping[int, Figures], policies: Sequence[str], lengths: Sequence[int]) -> Findings:
    """The table and the claims, by size of batch."""
    lines: list[Sequence[object]] = []
    claims = list[Claim]()
    for size, figures in tables.items():
        for own, k in ((name(policy, k), k) for policy in policies for k in lengths):
            timed = figures.timed(own)
            over = gain(figures.speed(own), figures.speed(name("fixed", k))).text("+.1f") if timed else "-"
            lines.append([size, *figures.cells(own), over])
        claims += claims_of(size, figures, policies, lengths)
    table = Table(head=("batch", *HEAD, "tokens/s over fixed at this k, %"), lines=lines)
    return Findings(tables=[table], claims=claims)


def claims_of(size: int, figures: Figures, policies: Sequence[str], lengths: Sequence[int]) -> list[Claim]:
    """Speed and worth in batches of one size."""
    if not {"fixed", "tetris"} <= set(policies):
        return []
    ours, even = ([name(policy, k) for k in lengths] for policy in ("tetris", "fixed"))
    worths = [np.mean([figures.acceptance(m) for m in names], axis=0) for names in (ours, even)]
    made = [
        figures.claim(
            PAPER,
            f"TETRIS accepts more of what it verifies than an even length, batches of {size}.",
            gain(worths[0], worths[1]),
            rests_on=ours,
            published=None,
            unit="% of accepted per verified token",
            least=0.0,
            note=f"mean over k of {lengths[0]} to {lengths[-1]}",
        )
    ]
    if figures.timed(ours[0]):
        spread = [gain(figures.speed(a), figures.speed(b)).value for a, b in zip(ours, even, strict=True)]
        made.append(
            figures.claim(
                PAPER,
                f"TETRIS is faster than the best even length, batches of {size}.",
                gain(figures.best_speed(ours), figures.best_speed(even)),
                rests_on=ours,
                published="up to 5.25",
                unit=SPEED,
                least=0.0,
                note="for each the k that is best on the other half of the prompts; "
                f"at equal k from {min(spread):+.1f} % to {max(spread):+.1f} %",
            )
        )
    return made


def run(
    setting: Setting,
    policies: Sequence[str] = tuple(POLICIES),
    lengths: Sequence[int] = LENGTHS,
    sizes: Sequence[int] = BATCHES,
    *,
    timed: Path | None = None,
    clock: bool = False,
) -> list[dict[str, Any]]:
    """Count or time, and write; returns the claims."""
    if setting.num_prompts < max(sizes):
        raise InputError(f"num_prompts must be >= {max(sizes)}, the largest batch, got {setting.num_prompts}")
    ways = methods(policies, lengths)
    times = {size: None if timed is None else StepSeconds.read(timed, size) for size in sizes}
    with folder(setting.out, "sharing", {**vars(setting), "timed": timed, "clock": clock}) as place:
        bench = Bench(setting, max_slots=max(sizes), ignore_eos=True)
        questions = bench.questions(setting.num_prompts)
        jobs = {size: batches(questions, size, setting.seeds) for size in sizes}
        if clock:
            rows = {size: bench.measure(place, f"batches of {size}", ways, jobs[size]) for size in sizes}
            tables = [replace(seconds_table(ways, own), title=f"Batches of {size}") for size, own in rows.items()]
            return place.finish(Findings(tables=tables, text=setting.about))

        found = {}
        for size in sizes:

            def judge(rows: Sequence[Row], size: int = size) -> Sequence[Claim]:
                return claims_of(size, Figures(ways, rows, times[size]), policies, lengths)

            rows_ = count_until_clear(bench, place, ways, jobs[size], judge)
            if rows_:
                found[size] = Figures(ways, rows_, times[size])
        if not found:
            raise nothing_whole(place)
        text = about(setting, times[sizes[0]], max(figures.sums.num_prompts for figures in found.values()))
        return place.finish(replace(findings(found, policies, lengths), text=text))


@options.with_fields(Setting, num_prompts=32, seeds=8, max_new_tokens=64, dtype="float32")
def main(setting: Setting, timed: options.Timed = None, clock: options.Clock = False) -> None:
    """Measure sharing a batch's budget by estimated acceptance against sharing it evenly."""
    run(setting, timed=timed, clock=clock)
