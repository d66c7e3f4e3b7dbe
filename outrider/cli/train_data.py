"""outrider train data: let the target answer the prompts of a corpus."""

import sys
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from outrider.cli.failure import INTERRUPTED, complain
from outrider.cli.opened import opened
from outrider.cli.printed import print_json
from outrider.cli.request import RequestOptions
from outrider.core.inputs import InputError
from outrider.setup import Setup
from outrider.training.options import DataOptions

MAX_NEW_TOKENS = 256
"""Most tokens of an answer, by default."""
SHOWN = 3
"""Most prompts without an answer that are named."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What was asked for.

    Attributes:
        setup: The engine.
        request: How answers are drawn.
        data: Where the prompts are.
        out: The file of answers.
        prompt_tokens: Tokens of a text without a prompt that become the prompt.
        as_json: Whether the result is printed as JSON.
    """

    setup: Setup
    request: RequestOptions
    data: DataOptions
    out: Path
    prompt_tokens: int
    as_json: bool


def run(task: Task) -> None:
    """Answer the prompts, and print what was done."""
    try:
        from outrider.training.data.records import read_documents
        from outrider.training.data.regenerate import GenerationRequest, Regenerated, regenerate
        from outrider.training.data.sources import Part
    except ModuleNotFoundError as error:
        raise InputError(f"training needs {error.name}; `pip install outrider[train]` installs it") from error

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    part = Part(split=task.data.split, config=task.data.subset, columns=task.data.columns)
    engine = opened(task.setup)
    generation = GenerationRequest(
        sampling=task.request.sampling(engine.sampling),
        max_new_tokens=task.request.max_new_tokens or MAX_NEW_TOKENS,
        prompt_tokens=task.prompt_tokens,
    )
    width = engine.parts.target.vocab_size
    corpus = read_documents(
        task.data.data, engine.tokenizer, part=part, limit=task.data.limit, prompts=True, vocab_size=width
    )
    if not task.as_json:
        console.print(f"{corpus}", style="cyan")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=task.as_json) as progress:
        bar = progress.add_task("answering", total=len(corpus))

        def said(run: Regenerated) -> None:
            if run.num_done == run.num_kept:
                # Otherwise the time left would count answers of earlier runs.
                progress.reset(bar, total=run.num_prompts, completed=run.num_kept)
            progress.update(bar, completed=run.num_done)

        try:
            done = regenerate(engine, corpus, task.out, generation, progress=said)
        except KeyboardInterrupt:
            progress.stop()
            print(f"interrupted; the same command continues {task.out}", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
    for number, failure in list(done.failed.items())[:SHOWN]:
        complain(InputError(f"prompt {number} has no answer: {failure}"))
    found = {
        "prompts": done.num_prompts,
        "kept": done.num_kept,
        "answers": done.num_answers,
        "tokens": done.num_tokens,
        "failed": len(done.failed),
        "out": str(task.out),
    }
    if task.as_json:
        print_json(found)
        return
    failed = f"; {len(done.failed)} prompts have no answer" if done.failed else ""
    kept = f", {done.num_kept} were there before" if done.num_kept else ""
    console.print(f"{done.num_answers} answers with {done.num_tokens} tokens in {task.out}{kept}{failed}", style="cyan")
