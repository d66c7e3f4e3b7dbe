"""outrider doctor: what works with a target, how well a drafter fits it, and the speedup to expect here."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from outrider import catalog
from outrider.assembly import completed, tokenizer_of
from outrider.bench.agreement import LEAST_TEXT, RowAgreement
from outrider.bench.doctor import LENGTHS, Diagnosis, Side, Worth, compare_sides, measure
from outrider.bench.examination import Judge, examine
from outrider.cli.opened import check_numbers, opened
from outrider.cli.printed import table
from outrider.cli.prompts import read_file
from outrider.core import progress
from outrider.core.deadline import Deadline
from outrider.core.option import CheckedOptions, option
from outrider.core.types import InputError
from outrider.drafters.protocol import UnboundModel
from outrider.embedded import ASSETS
from outrider.engine.engine import Engine
from outrider.engine.prompts import Prompt
from outrider.host.threads import use_threads
from outrider.lm.hf.capabilities import capabilities
from outrider.lm.hf.open import as_device, as_dtype, open_config
from outrider.lm.weights.quantiser import Quantiser
from outrider.lm.weights.rounder import Rounder
from outrider.setup import Setup

TEXT = ASSETS / "prompts.jsonl"
EXAMINED = 16
"""Most texts that the target continues while a head is examined."""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(CheckedOptions):
    """What to measure.

    Attributes:
        num_speculative_tokens: Length of the drafts.
        temperature: Of target and drafter.
        num_tokens: Most tokens of text to read.
        rounds: How often to time costs; 0 skips them.
        time_limit: Seconds to measure, about.
    """

    num_speculative_tokens: int = option(least=1)
    temperature: float = option(least=0)
    num_tokens: int = option(least=LEAST_TEXT)
    rounds: int = option(least=0)
    time_limit: float = option(above=0, finite=False, note=" seconds")


def doctor(setup: Setup, plan: DoctorOptions, *, text: Path | None, as_json: bool) -> None:
    """Examine a target and a drafter, measure them, and print the findings."""
    with progress.shown("examining"):
        diagnosis = _diagnosis(setup, plan, text)
    if as_json:
        print(json.dumps(diagnosis.to_json(), indent=2))
    else:
        _print(diagnosis)


def _diagnosis(setup: Setup, plan: DoctorOptions, text: Path | None) -> Diagnosis:
    """The findings."""
    _check_setup(setup)
    if text is not None and setup.target is not None and setup.drafter is None:
        raise InputError("--text is for measuring a drafter; give --drafter too, or leave out --text")
    chosen = completed(setup).drafter if setup.target is None else setup.drafter
    diagnosis = _looked_at(completed(setup), None if chosen is None else str(chosen))
    if chosen is not None:
        prompts = read_file(TEXT if text is None else text)
        measured = replace(
            setup, drafter=chosen, length=f"fixed:{plan.num_speculative_tokens}", tree="chain", verifier=None
        )
        try:
            engine = opened(replace(measured, decoding="step", allow_lossy=False))
            check_numbers(engine)
        except InputError as error:
            diagnosis = replace(diagnosis, refusal=str(error))
        else:
            diagnosis = _measured(engine, diagnosis, prompts, plan)
    return diagnosis


def examine_head(setup: Setup, head: str, *, text: Path | None, as_json: bool) -> None:
    """Say why a head drafts badly, one sentence for each finding."""
    if setup.drafter is not None:
        raise InputError("give the head as HEAD or as --drafter, not both: HEAD is examined, and --drafter is measured")
    _check_setup(setup)
    prompts = read_file(TEXT if text is None else text)
    some = random.Random(0).sample(list(prompts), min(EXAMINED, len(prompts)))
    with progress.shown("examining"):
        engine = opened(replace(setup, drafter="none", tree="chain", length="fixed:1", verifier=None, decoding="step"))
        if engine.tokenizer is None:
            raise InputError(
                "there is no tokenizer beside the target, so no text can be read; give one with --tokenizer"
            )
        judge = Judge.listening(engine, [_encoded(engine, prompt) for prompt in some])
        report = examine(head, judge)
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    if report.tokens_per_step is not None:
        line = f"{head}: {report.tokens_per_step:.2f} tokens per step of {report.depth} draft tokens at temperature 1"
        console.print(f"{line}, along {len(some)} texts of the target", markup=False)
    for each in report.findings:
        console.print(f"- {each.about}: {each.sentence}", markup=False)
    if not report.findings:
        console.print("Nothing was found that lowers its acceptance.")


def _check_setup(setup: Setup) -> None:
    """Find what is wrong with a setup before anything is opened."""
    as_dtype(setup.dtype)
    as_device(setup.device)
    Quantiser.of(setup.weights)
    Rounder.of(setup.activations)
    use_threads(setup.threads)


def _looked_at(setup: Setup, drafter: str | None) -> Diagnosis:
    """Findings from configs and tokenizers; loads no weights."""
    config = open_config(str(setup.target), revision=setup.revision, trust_remote_code=setup.trust_remote_code)
    side = Side(config=config, tokenizer=tokenizer_of(setup))
    part = None if drafter is None else catalog.make("drafter", drafter)
    aspects = None
    if isinstance(part, UnboundModel):
        aspects = compare_sides(side, Side(config=part.read_config(), tokenizer=part.read_tokenizer()))
    return Diagnosis(capabilities=capabilities(config), drafter=drafter, aspects=aspects)


def _encoded(engine: Engine, prompt: Prompt) -> list[int]:
    """Token ids of a prompt. Without a chat template, messages are joined as plain text."""
    if isinstance(prompt, str) or engine.tokenizer is None or engine.tokenizer.chat_template is not None:
        return engine.encode(prompt)
    return engine.encode("\n".join(str(each["content"]) for each in prompt if isinstance(each, Mapping)))


def _measured(engine: Engine, diagnosis: Diagnosis, prompts: Sequence[Prompt], plan: DoctorOptions) -> Diagnosis:
    """The diagnosis with measurements."""
    if engine.tokenizer is None:
        note = "There is no tokenizer beside the target, so no text can be measured."
        return replace(diagnosis, notes=(note,))
    texts = _some([_encoded(engine, prompt) for prompt in prompts], plan.num_tokens, engine)
    measured = measure(
        engine,
        texts,
        num_speculative_tokens=plan.num_speculative_tokens,
        temperature=plan.temperature,
        rounds=plan.rounds,
        until=Deadline.after(plan.time_limit),
    )
    return replace(diagnosis, **vars(measured))


def _some(texts: Sequence[Sequence[int]], num_tokens: int, engine: Engine) -> list[list[int]]:
    """Random texts until there are enough tokens; none longer than the contexts allow."""
    limits = [engine.parts.target.max_context, engine.parts.drafter.max_context or engine.parts.target.max_context]
    longest = min(limits) - 1
    chosen: list[list[int]] = []
    left = num_tokens
    for each in random.Random(0).sample(list(texts), len(texts)):
        if min(left, longest, len(each)) >= LEAST_TEXT:
            chosen.append(list(each[: min(left, longest)]))
            left -= len(chosen[-1])
    if not chosen:
        raise InputError(
            f"no text has {LEAST_TEXT} tokens within the context of {longest + 1}; give a longer one with --text"
        )
    return chosen


def _print(diagnosis: Diagnosis) -> None:
    console = Console(highlight=False)
    features = table(("feature", "supported", "reason"), "the target", words=3, overflow="fold")
    for each in diagnosis.capabilities:
        features.add_row(each.feature, "yes" if each.supported else "no", each.reason)
    console.print(features)
    if diagnosis.aspects is not None:
        columns = ("", "target", "draft model", "same", "what a difference means")
        aspects = table(columns, "\ntarget and draft model", words=5, overflow="fold")
        for aspect in diagnosis.aspects:
            word = "yes" if aspect.same else "no"
            aspects.add_row(aspect.name, aspect.target, aspect.draft, word, "" if aspect.same else aspect.means)
        console.print(aspects)
    if diagnosis.refusal is not None:
        console.print(f"\nrefused: {diagnosis.refusal}", markup=False)
    for note in diagnosis.notes:
        console.print(f"\n{note}", markup=False)
    if diagnosis.by_position is not None:
        console.print(_agreement("\nalong the text, by position", "position", diagnosis.by_position))
    if diagnosis.by_depth is not None:
        console.print(_agreement("\ninto drafts that begin in the text, by depth", "depth", diagnosis.by_depth))
    if diagnosis.free is not None:
        free = diagnosis.free
        columns = ("depth", "accepted", "if judged", "sum min(p, q)", "same argmax")
        depths = table(columns, "\nfree running, by depth", words=0)
        for i, share in enumerate(free.unconditional):
            judged = f"{free.conditional[i]:.1%}" if i < len(free.conditional) else "-"
            rows = free.rows[i] if i < len(free.rows) else None
            alpha, argmax = ("-", "-") if rows is None else (f"{rows.alpha:.3f}", f"{rows.argmax:.1%}")
            depths.add_row(str(i + 1), f"{share:.1%}", judged, alpha, argmax)
        console.print(depths)
        console.print(
            f"{free.num_steps} steps, {free.num_accepted_tokens} of {free.num_draft_tokens} draft tokens accepted, "
            f"block efficiency {free.block_efficiency:.2f}, acceptance {free.acceptance:.1%} of the judged tokens"
        )
    if diagnosis.by_depth and diagnosis.free is not None and diagnosis.free.rows:
        console.print(
            f"sum min(p, q) after what is committed: {diagnosis.by_depth[0].alpha:.3f} along the text, "
            f"{diagnosis.free.rows[0].alpha:.3f} free running. Along a text both models go on from words that neither "
            "chose; free running they go on from the target's own, which is what a request does."
        )
    if diagnosis.worth is not None:
        _print_worth(console, diagnosis.worth)
    if diagnosis.worth_together is not None:
        _print_costs(console, diagnosis.worth_together)


def _agreement(title: str, where: str, rows: Sequence[RowAgreement]) -> Table:
    agreement = table((where, "pairs", "sum min(p, q)", "total variation", "same argmax"), title, words=0)
    for row in rows:
        agreement.add_row(row.where, str(row.count), f"{row.alpha:.3f}", f"{row.variation:.3f}", f"{row.argmax:.1%}")
    return agreement


def _print_worth(console: Console, worth: Worth) -> None:
    title = "\nspeedup by acceptance and draft length, by measured costs"
    speedups = table(("acceptance", *map(str, LENGTHS)), title, words=0)
    for acceptance, row in worth.speedups.items():
        measured = " (measured)" if acceptance == worth.acceptance else ""
        speedups.add_row(f"{acceptance:.2f}{measured}", *(f"{row[length]:.2f}" for length in LENGTHS))
    even = (worth.break_even[length] for length in LENGTHS)
    speedups.add_row("break-even", *("never" if a is None else f"{a:.2f}" for a in even))
    console.print(speedups)
    _print_costs(console, worth)


def _print_costs(console: Console, worth: Worth) -> None:
    costs = worth.costs
    best = f"best length {worth.best_length}, which would give {worth.best_speedup:.2f}x "
    best += f"(--length planned:draft_cost={costs.draft:.2f},token_cost={costs.token:.3f} goes by it)"
    if worth.best_speedup <= 1:
        best = "no length pays, so draft nothing (--drafter none): "
        best += f"the best one, {worth.best_length}, would give {worth.best_speedup:.2f}x"
    who = "a request alone" if worth.num_requests == 1 else f"{worth.num_requests} requests together"
    console.print(
        f"{who}: one drafter call costs {costs.draft:.2f} target forwards, one more verified token {costs.token:.3f}; "
        f"{best}"
    )
