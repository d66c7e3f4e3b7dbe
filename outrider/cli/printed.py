"""The printing of `outrider generate`: outputs and measurements, for people and for programs."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.engine.engine import Engine
from outrider.engine.output import Output
from outrider.lengths.protocol import LoadPolicy


def print_json(record: Mapping[str, Any]) -> None:
    """Print an object of JSON, in characters that standard output can show."""
    utf8 = (getattr(sys.stdout, "encoding", None) or "utf-8").lower() in ("utf-8", "utf8")
    print(json.dumps(record, ensure_ascii=not utf8), flush=True)


def table(columns: Sequence[str], title: str | None = None, *, words: int = 1, **options: Any) -> Table:
    """A table without a frame. Its first columns hold words, the others numbers, which stand at the right.

    Args:
        words: How many columns hold words.
        options: Of every column, as rich has them.
    """
    made = Table(title=title, title_justify="left", box=None)
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number < words else "right", **options)
    return made


def print_output(index: int, output: Output) -> None:
    """Print one of several outputs."""
    console = Console(highlight=False, soft_wrap=True)
    console.rule(f"output {index + 1}: {output.finish_reason}, {len(output.tokens)} tokens", align="left")
    console.print(output.text, markup=False)


FEW = 0.05
"""Draft tokens per step of which the reader wants to know why there are so few."""


def why_few_drafts(engine: Engine, outputs: Sequence[Output]) -> str | None:
    """Why (nearly) nothing was drafted, as a sentence; None where more was, or where nothing was to be."""
    policy, steps = engine.parts.length, sum(output.num_steps for output in outputs)
    drafted = sum(output.num_draft_tokens for output in outputs)
    if engine.parts.drafter.max_depth == 0 or not isinstance(policy, LoadPolicy) or drafted > FEW * steps:
        return None
    return f"{'little' if drafted else 'nothing'} was drafted: {policy.why_plain(engine.parts.experience)}"


def print_measures(outputs: Sequence[Output], why: str | None = None) -> None:
    """Print the numbers of tokens, of steps and of accepted draft tokens, and why there were so few of these."""
    tokens = sum(len(o.tokens) for o in outputs)
    steps = sum(o.num_steps for o in outputs)
    drafted, accepted = sum(o.num_draft_tokens for o in outputs), sum(o.num_accepted_tokens for o in outputs)
    # A server may not tell its steps.
    line = f"{tokens} tokens in {steps} steps: block efficiency {tokens / steps:.2f}" if steps else f"{tokens} tokens"
    if drafted:
        line += f", {accepted} of {drafted} draft tokens accepted ({accepted / drafted:.0%})"
    if len(outputs) == 1:
        line += f", {outputs[0].tokens_per_second:.0f} tokens/s"
    print_line(line if why is None else f"{line}; {why}")


def print_line(line: str) -> None:
    """Print a line of measurements on standard error."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(line, style="cyan")


def note_room(engine: Engine, max_new_tokens: int | None) -> None:
    """Say what will end an output, if the context is full before it has the tokens that were asked for."""
    longest = engine.parts.target.max_context
    if max_new_tokens is not None and max_new_tokens >= longest:
        print_line(
            f"an output ends where the context of {longest} tokens is full, before max_new_tokens={max_new_tokens}"
        )


def print_profile(profile: Mapping[str, Any], forwards: Mapping[str, str]) -> None:
    """Print the parts of a step's time, and how the forwards of each model run."""
    spent = dict(profile["ms_per_iteration"])
    overlap = spent.pop("overlap")
    total = sum(spent.values()) - overlap or 1
    title = f"where the time of {profile['iterations']} iterations goes"
    parts = table(("part", "ms per iteration", "share"), title)
    for part, milliseconds in [*spent.items(), *([("at once", -overlap)] if overlap else [])]:
        parts.add_row(part, f"{milliseconds:.2f}", f"{milliseconds / total:.1%}")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(parts)
    for role, how in forwards.items():
        console.print(f"forwards of the {role}: {how}", style="cyan")
