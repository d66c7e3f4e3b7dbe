"""outrider train distill: train a draft model to guess what a target says."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from outrider.cli.opened import opened
from outrider.cli.printed import print_json
from outrider.core.types import InputError, Sampling
from outrider.learning.batch import Document
from outrider.learning.divergences import CHUNK, HARD, divergence
from outrider.learning.learner import Learner
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.open import open_config, open_model, open_tokenizer
from outrider.setup import Setup
from outrider.training.data.batches import Batches
from outrider.training.data.capture import capture
from outrider.training.data.documents import fingerprint_of
from outrider.training.data.records import read_documents
from outrider.training.data.regenerate import GenerationRequest, regenerate
from outrider.training.data.shards import Captured, Contents
from outrider.training.data.sources import Part
from outrider.training.distill import Data, Distilled, distilled
from outrider.training.estimate import Work, estimate, trial
from outrider.training.loop import processes
from outrider.training.loop.checkpoint import make_folder, newest
from outrider.training.loop.journal import read
from outrider.training.loop.settings import Settings
from outrider.training.loop.steps import FOLDER, Progress, Trained, place, train
from outrider.training.loop.watch import Watch, hold_out
from outrider.training.positions import positions_of

ANSWERS = "answers.jsonl"
"""The file of the target's answers, in the folder of the run."""
REPORT = "report.html"
STATES = "states"
"""The folder of the target's captured states, in the folder of the run."""
HELD_OUT = 0.05
"""Share of the documents that is watched if no other file is named."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What was asked for.

    Attributes:
        settings: How to train.
        target: The target's directory or hub id.
        drafter: The draft model's; None where none is trained.
        sources: Where the texts are.
        out: Folder of the result.
        divergence: Name of the loss.
        texts: Which texts the draft model learns on.
        positions: Where a draft model sees the tokens in training.
        capture: Whether the target's states are captured once, before the training.
        held_out: Where the watched texts are; empty takes a share of the documents.
        depth: Draft tokens of a step that is watched.
        watch_temperature: At which temperature the best drafter is the best.
        split: The split of a dataset.
        subset: The configuration of a dataset.
        limit: Most documents to read.
        as_json: Whether the result is printed as JSON.
    """

    settings: Settings
    target: str
    drafter: str | None
    sources: Sequence[str]
    out: Path
    divergence: str
    texts: str
    positions: str = "plain"
    capture: bool = False
    held_out: Sequence[str]
    depth: int
    watch_temperature: int
    split: str
    subset: str | None
    limit: int | None
    as_json: bool


Make = Callable[[PreTrainedModel, PreTrainedTokenizerBase | None, torch.device, Sequence[Document]], Learner]
"""Makes a learner from the target, its tokenizer, the device and the documents to learn from."""
More = Callable[[Learner, Trained, Watch], dict[str, Any]]
"""What is found out about a trained drafter, for the record that is printed: words that a person reads, by name."""


def run(task: Task) -> None:
    """Train, write the draft model and the report, and print what was reached."""
    data = Data.of(task.texts)

    def make(
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        device: torch.device,
        documents: Sequence[Document],
    ) -> Distilled:
        return distilled(
            str(task.drafter),
            target,
            tokenizer,
            loss=task.divergence,
            data=data,
            seed=task.settings.seed,
            device=device,
            positions=task.positions,
        )

    run_with(
        task, make, regenerated=data.regenerated, about={"texts": task.texts, "positions": task.positions}, name="model"
    )


def run_with(
    task: Task, make: Make, *, regenerated: bool, about: dict[str, Any], name: str, more: More | None = None
) -> None:
    """Train a learner, write its drafter and the report, and print what was reached.

    Args:
        make: Makes the learner.
        regenerated: Whether the target answers the prompts of the corpus first.
        about: What a run must keep when it goes on, beside what every run has.
        name: The drafter's name in the catalog.
        more: What is found out about the trained drafter; None: nothing.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # Wrong names are told before anything is loaded.
    if task.divergence != HARD:
        divergence(task.divergence)
    positions_of(task.positions, limit=1, seed=0)
    device, main = place(task.settings), processes.is_first()
    console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=task.as_json or not main)
    tokenizer = open_tokenizer(task.target)
    learnt, watched = _documents(task, tokenizer, regenerated=regenerated, console=console)
    target = open_model(task.target, device=device).requires_grad_(False)
    learner = make(target, tokenizer, device, learnt)
    settings = task.settings
    about = {
        **about,
        "target": Path(task.target).name,
        "drafter": None if task.drafter is None else Path(task.drafter).name,
        "divergence": task.divergence,
        "documents": fingerprint_of(learnt),
        "held_out": fingerprint_of(watched),
        "depth": task.depth,
        "watch_temperature": task.watch_temperature,
        "capture": task.capture,
    }
    console.print(f"{len(learnt):,} documents to learn from, {len(watched):,} to watch", style="cyan")
    captured = _captured(task, learner, target, learnt, console) if task.capture else None
    batches = Batches(
        learnt, batch_size=settings.batch_size, max_length=settings.max_length, seed=settings.seed, captured=captured
    )
    watch = Watch(
        watched, depth=task.depth, max_length=settings.max_length, temperature=1 if task.watch_temperature else 0
    )
    if newest(task.out / FOLDER) is None:
        console.print(_foretold(learner, target, batches, settings), style="cyan")
    with _shown(console) as show:
        done = train(learner, batches, settings, task.out, watch, show, about=about)
    if main:
        _tell(task, done, console, name, {} if more is None else more(learner, done, watch))


def _foretold(learner: Learner, target: PreTrainedModel, batches: Batches, settings: Settings) -> str:
    """The memory and the time that training will take: from the models, and from a few passes."""
    rows = min(settings.micro_batch_size or settings.batch_size, max(1, settings.batch_size // processes.count()))
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(settings.precision)
    work = Work(
        rows=rows,
        length=settings.max_length,
        chunk=CHUNK,
        activation_bytes=4 if half is None else 2,
        num_shards=processes.num_shards(),
    )
    trained = [p for p in learner.parameters() if p.requires_grad]
    if isinstance(learner, Distilled):
        planned = str(estimate(learner.model, target, work, target_bytes=target.dtype.itemsize))
    else:
        planned = f"{sum(p.numel() for p in trained):,} trained parameters"
    batch = batches.share(batches.batch(0), range(rows)).to(target.device)

    def loss() -> torch.Tensor:
        with torch.autocast(target.device.type, dtype=half, enabled=half is not None):
            found = learner(batch)
        return found.total / max(1.0, float(found.weight))

    timed = trial(loss, trained, num_tokens=int(batch.lengths.sum()))
    return f"{planned}\n{timed}"


def _documents(
    task: Task, tokenizer: PreTrainedTokenizerBase | None, *, regenerated: bool, console: Console
) -> tuple[Sequence[Document], Sequence[Document]]:
    """The documents to learn from, and those to watch."""
    part = Part(split=task.split, config=task.subset)
    # What is longer than the target's context cannot be captured as a whole.
    most = Anatomy.of(open_config(task.target)).longest_context if task.capture else None
    if regenerated:
        corpus = read_documents(_answers(task, part, console), tokenizer, max_tokens=most)
    else:
        corpus = read_documents(task.sources, tokenizer, part=part, limit=task.limit, max_tokens=most)
    if task.held_out:
        return corpus, read_documents(task.held_out, tokenizer, part=part)
    return hold_out(corpus, HELD_OUT, seed=task.settings.seed)


def _answers(task: Task, part: Part, console: Console) -> Path:
    """The file of the target's answers to the prompts of the corpus. The first process of each machine writes it."""
    folder = task.out / FOLDER
    make_folder(folder)
    if processes.is_first_of_machine():
        drafter = "suffix" if task.drafter is None else f"model:path={task.drafter}"
        setup = Setup(target=task.target, drafter=drafter, device=task.settings.device)
        engine = opened(setup)
        width = engine.parts.target.vocab_size
        corpus = read_documents(
            task.sources, engine.tokenizer, part=part, limit=task.limit, prompts=True, vocab_size=width
        )
        generation = GenerationRequest(
            sampling=Sampling(seed=task.settings.seed), max_new_tokens=max(1, task.settings.max_length // 2)
        )
        console.print(f"the target answers {len(corpus):,} prompts", style="cyan")
        done = regenerate(engine, corpus, folder / ANSWERS, generation)
        if done.failed:
            console.print(f"{len(done.failed):,} prompts have no answer", style="red")
    processes.wait()
    return folder / ANSWERS


def _captured(
    task: Task, learner: Learner, target: PreTrainedModel, documents: Sequence[Document], console: Console
) -> Captured:
    """The target's states along the corpus. The first process of each machine captures those that are not there."""
    if not learner.captured_taps:
        raise InputError(
            "capture needs texts that stay as they are and a loss that reads the target; leave out capture, on_policy "
            "and ce"
        )
    folder = task.out / FOLDER / STATES
    if processes.is_first_of_machine():
        columns = (
            TextColumn("captured"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Bars(*columns, console=console, disable=console.quiet) as bars:
            bar = bars.add_task("captured", total=len(documents))
            capture(
                target,
                documents,
                Contents(taps=learner.captured_taps),
                out=folder,
                progress=lambda count: bars.update(bar, completed=count),
            )
    processes.wait()
    return Captured.open(folder, model=target, documents=documents)


@contextmanager
def _shown(console: Console) -> Iterator[Callable[[Progress], None]]:
    """A bar of the steps, with the loss, the last measurement and the time left."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(*columns, TextColumn("{task.fields[said]}"), console=console, disable=console.quiet) as bars:
        bar = bars.add_task("training", total=None, said="")

        def show(progress: Progress) -> None:
            said = f"{progress.seconds_left or 0:.0f} s left"
            if progress.loss is not None:
                said += f", loss {progress.loss:.4f}"
            if progress.watched is not None:
                said += f", block efficiency {progress.watched.block_efficiency:.3f}"
            bars.update(bar, total=progress.steps, completed=progress.step, said=said)

        yield show


def _tell(task: Task, done: Trained, console: Console, name: str, more: dict[str, Any]) -> None:
    """Write the report, and print what was reached."""
    lines = read(done.log)
    watched = [line for line in lines if line["kind"] == "watch"]
    record: dict[str, Any] = {"out": str(done.out), "step": done.step, "log": str(done.log)} | more
    if watched:
        kept = next((line for line in watched if line["step"] == done.step), watched[-1])
        names = ("block_efficiency", "block_efficiency_greedy")
        record |= {"before": {name: watched[0][name] for name in names}, "after": {name: kept[name] for name in names}}
    try:
        from outrider.bench.training_report import page
    except ModuleNotFoundError as error:
        console.print(f"the report needs {error.name}; `pip install outrider[bench]` installs it", style="red")
    else:
        report = done.log.with_name(REPORT)
        report.write_text(page(task.out.name, lines), encoding="utf-8")
        record["report"] = str(report)
    if task.as_json:
        print_json(record)
        return
    if watched:
        before, after = record["before"], record["after"]
        console.print(
            f"block efficiency on held-out texts: {before['block_efficiency']:.3f} before, "
            f"{after['block_efficiency']:.3f} after {done.step} steps; at temperature 0 "
            f"{before['block_efficiency_greedy']:.3f} and {after['block_efficiency_greedy']:.3f}",
            style="cyan",
        )
    for what, found in more.items():
        console.print(f"{what}: {found}", style="cyan")
    console.print(f"the drafter is in {done.out}; use it with --drafter {name}:path={done.out}", style="cyan")
