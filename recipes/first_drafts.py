"""Whether a user's first command drafts: `outrider generate` with a target and a draft model, in fresh processes.

`python -m recipes first_drafts --target DIR --drafter model:path=DIR --out DIR` starts processes with an empty cache
each, and with costs that earlier processes kept, with each number of threads. Without `--target` it runs the embedded
pair. It counts the processes that drafted, so a busy machine does no harm.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from outrider.bench.evidence import Row
from outrider.bench.folder import folder
from outrider.bench.report import Findings, Table
from outrider.bench.turns import Turn, turns
from recipes import options
from recipes.fresh import row_of
from recipes.label import Label

CACHES = ("empty", "kept")
PROMPT = "def quicksort(arr):"
QUICK = {"processes": 1, "threads": "1", "caches": "empty", "max_new_tokens": 16}


def answered(command: Sequence[str], threads: int, cache: str) -> Row:
    """What a fresh process drafted."""
    found = row_of(command, threads, OUTRIDER_CACHE=cache)
    names = ("num_steps", "num_draft_tokens", "num_accepted_tokens")
    return {name: found[name] for name in names} | {"why": found.get("why_few_drafts", "")}


def findings(rows: Sequence[Row]) -> Findings:
    """A line for each number of threads and state of the cache."""
    lines = []
    for threads, cache in dict.fromkeys((row["threads"], row["cache"]) for row in rows):
        own = [row for row in rows if (row["threads"], row["cache"]) == (threads, cache)]
        steps, drafted, accepted = (
            sum(row[name] for row in own) for name in ("num_steps", "num_draft_tokens", "num_accepted_tokens")
        )
        drafting = sum(row["num_draft_tokens"] > 0 for row in own)
        lines.append([threads, cache, f"{drafting} of {len(own)}", steps, drafted, accepted])
    head = ("threads", "cache", "processes that drafted", "steps", "draft tokens", "accepted")
    silent = [row["why"] for row in rows if not row["num_draft_tokens"]]
    text = f"{len(rows) - len(silent)} of {len(rows)} fresh processes drafted." + "".join(f"\n{why}" for why in silent)
    return Findings(tables=[Table(head=head, lines=lines)], text=text)


def main(
    out: options.Out = None,
    target: options.Target = None,
    drafter: options.Drafter = None,
    prompt: Annotated[str, typer.Option(help="The prompt.")] = PROMPT,
    max_new_tokens: options.MaxNewTokens = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="The temperature.")] = 0.0,
    processes: Annotated[int, typer.Option(min=1, help="Fresh processes of each kind.")] = 10,
    threads: Annotated[str, typer.Option(help="Numbers of threads.")] = "1,2",
    caches: Annotated[str, typer.Option(help="What earlier processes left: empty, kept.")] = "empty,kept",
) -> list[Row]:
    """Count the fresh processes of which the first command drafts."""
    given = {**locals(), "target": None if target is None else Path(target).name}
    named = Label.each(options.words(caches, "--caches", CACHES))
    command = ["-m", "outrider", "generate", "--json", "--prompt", prompt]
    command += ["--temperature", f"{temperature:g}", "--max-new-tokens", str(max_new_tokens)]
    for option, value in (("--target", target), ("--drafter", drafter)):
        command += [] if value is None else [option, value]
    with folder(out, "first_drafts", given) as place, tempfile.TemporaryDirectory() as kept:

        def made(turn: Turn[Label, Label]) -> Row:
            head = {"threads": turn.job.value, "cache": turn.way.name}
            with tempfile.TemporaryDirectory() as empty:
                return head | answered(command, turn.job.value, kept if turn.way.name == "kept" else empty)

        jobs = Label.each(options.whole_numbers("--threads", threads), "{} threads")
        rows = place.take("processes", turns(named, jobs, rounds=processes), made)
        place.finish(findings(rows))
        return rows
