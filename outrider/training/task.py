"""A run of training from beginning to end: texts, the target's answers and states, the loop, the report.

`train_head` trains a head of the catalog; the command line, Python and recipes call it. `train_drafter` does the same
with any learner.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from outrider.assembly import assemble
from outrider.core import progress
from outrider.core.types import InputError, Sampling
from outrider.heads.objective import HeadContext, HeadObjective
from outrider.heads.spec import HeadSpec
from outrider.learning.batch import Document
from outrider.learning.divergences import CHUNK, HARD, divergence
from outrider.learning.learner import Learner
from outrider.learning.options import HeadOptions
from outrider.lm.forwards.packed import keeps_bits
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.open import open_config, open_model, open_tokenizer
from outrider.lm.slots.cache import free_bytes
from outrider.setup import Setup
from outrider.training.data.batches import Batches, HasStates
from outrider.training.data.capture import capture
from outrider.training.data.documents import fingerprint_of
from outrider.training.data.records import read_documents
from outrider.training.data.regenerate import AnswerOptions, regenerate
from outrider.training.data.shards import Captured, Contents
from outrider.training.data.sources import DatasetPart
from outrider.training.data.vllm_states import VllmStates
from outrider.training.decoded import DecodedPrompts
from outrider.training.distill import Data, distilled
from outrider.training.estimate import (
    Work,
    estimate,
    head_estimate,
    num_parameters,
    operations_per_second,
    output_layer_advice,
    skeleton,
)
from outrider.training.loop import processes
from outrider.training.loop.checkpoint import make_folder, newest
from outrider.training.loop.journal import read
from outrider.training.loop.settings import TrainSettings
from outrider.training.loop.steps import FOLDER, Progress, Trained, claimed, place, settled, train
from outrider.training.loop.watch import Evaluation, hold_out
from outrider.training.options import DataOptions, DistillOptions, SteerOptions, WatchOptions
from outrider.training.positions import positions_of
from outrider.training.steer import steered_learner

ANSWERS = "answers.jsonl"
"""The file of the target's answers, in the folder of the run."""
STATES = "states"
"""The folder of the target's captured states, in the folder of the run."""
SAMPLE = 64
"""Documents whose lengths stand for all in an estimate."""
EFFICIENCY = 0.5
"""Share of the speed of a matrix product that training is taken to reach."""
HELD_OUT = 0.05
"""Share of the documents that is watched if no other file is named."""


@dataclass(frozen=True, kw_only=True)
class TrainTask:
    """What is trained for whom, on what, and where it goes.

    Attributes:
        target: The target's directory or hub id.
        out: Folder of the result. If it holds this run, the run goes on where it stopped.
        settings: How to train.
        data: The texts.
        watch: What is measured beside.
        drafter: The draft model that answers prompts faster, or that is trained; None: there is none.
        estimate: Whether memory and hours are estimated, and nothing is trained.
    """

    target: str
    out: Path
    settings: TrainSettings = field(default_factory=TrainSettings)
    data: DataOptions
    watch: WatchOptions = field(default_factory=WatchOptions)
    drafter: str | None = None
    estimate: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """What a run is about, beside its task.

    Attributes:
        name: The drafter's name in the catalog.
        learner: Makes the learner from the target and the data.
        divergence: Name of the loss.
        about: What a run must keep when it goes on, beside what every run has.
        regenerated: Whether the target answers the prompts of the corpus first.
    """

    name: str
    learner: Callable[[HeadContext], Learner]
    divergence: str
    about: Mapping[str, Any]
    regenerated: bool


def train_head(spec: HeadSpec, options: HeadOptions, task: TrainTask, console: Console | None = None) -> dict[str, Any]:
    """Train a head and write it.

    Args:
        options: Of the class `spec.options`.
        console: Where progress is shown; None shows nothing.

    Returns:
        What was reached, as values of JSON: `out`, `step`, `log`, the acceptance `before` and `after`, and more.

    Raises:
        InputError: An option is not allowed, the data cannot be read, or the folder holds another run.
    """
    options.check()
    plan = TrainPlan(
        name=spec.name,
        learner=lambda context: spec.learner(options, context),
        divergence=options.divergence,
        about={**options.identity(), "head": spec.name, "texts": _texts(task)},
        regenerated=task.data.regenerate,
    )
    return train_drafter(plan, task, console)


def distill(options: DistillOptions, task: TrainTask, console: Console | None = None) -> dict[str, Any]:
    """Train a draft model, `task.drafter`. Returns and raises as `train_head`."""
    positions_of(options.positions, limit=1, seed=0)
    data = Data.of(options.texts)

    def learner(context: HeadContext) -> Learner:
        return distilled(
            str(task.drafter),
            context.target,
            context.tokenizer,
            loss=options.divergence,
            data=data,
            seed=context.seed,
            device=context.place,
            positions=options.positions,
        )

    about = {"texts": options.texts, "positions": options.positions}
    plan = TrainPlan(
        name="model", learner=learner, divergence=options.divergence, about=about, regenerated=data.regenerated
    )
    return train_drafter(plan, task, console)


def steer(options: SteerOptions, task: TrainTask, console: Console | None = None) -> dict[str, Any]:
    """Train a draft model, `task.drafter`, and what steers it. Returns and raises as `train_head`."""
    positions_of(options.positions, limit=1, seed=0)

    def learner(context: HeadContext) -> Learner:
        return steered_learner(
            str(task.drafter),
            context.target,
            context.tokenizer,
            loss=options.divergence,
            num_speculative_tokens=context.depth,
            device=context.place,
            rank=options.rank,
            taps=options.taps,
            frozen=options.frozen,
            positions=options.positions,
            seed=context.seed,
        )

    about_steering = {
        name: value for name, value in options.identity().items() if name in ("rank", "taps", "frozen", "positions")
    }
    plan = TrainPlan(
        name="steered",
        learner=learner,
        divergence=options.divergence,
        about={**about_steering, "texts": _texts(task)},
        regenerated=task.data.regenerate,
    )
    return train_drafter(plan, task, console)


def _texts(task: TrainTask) -> str:
    """What is learnt on, in a word."""
    return "target" if task.data.regenerate else "fixed"


def train_drafter(plan: TrainPlan, task: TrainTask, console: Console | None = None) -> dict[str, Any]:
    """Train a drafter as a plan says. Arguments and errors are those of `train_head`."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # Wrong names are told before anything is loaded.
    if plan.divergence != HARD:
        divergence(plan.divergence)
    device = place(task.settings)
    if task.estimate or newest(task.out / FOLDER) is None:
        with progress.task("estimating memory and hours"):
            planned = _estimated(plan, task, settled(task.settings, device), device)
        (console or Console(quiet=True)).print(planned, style="cyan")
        if task.estimate:
            return {"estimate": planned}
    with claimed(task.out):
        return _trained(plan, task, device, console or Console(quiet=True))


def _trained(plan: TrainPlan, task: TrainTask, device: torch.device, console: Console) -> dict[str, Any]:
    """The same, once the folder is held."""
    settings = settled(task.settings, device)
    tokenizer = open_tokenizer(task.target, what="model")
    learnt, watched = _documents(plan, task, tokenizer, console=console)
    target = open_model(task.target, device=device)
    kept, computed = target.dtype, computing_dtype(target.dtype, task, target, device)
    if computed != kept:
        console.print("the target computes in float32: this CPU has no products in bfloat16", style="cyan")
        target = target.to(computed)
    context = HeadContext(
        target=target.requires_grad_(False),
        tokenizer=tokenizer,
        documents=learnt,
        depth=task.watch.depth,
        watch_temperature=task.watch.watch_temperature,
        max_length=settings.max_length,
        seed=settings.seed,
        device=device,
        dtype=kept,
    )
    learner = plan.learner(context)
    if task.data.pack:
        learner.pack()
    about = {
        **plan.about,
        "target": Path(task.target).name,
        "drafter": None if task.drafter is None else Path(task.drafter).name,
        "divergence": plan.divergence,
        "documents": fingerprint_of(learnt),
        "held_out": fingerprint_of(watched),
        "capture": task.data.capture or task.data.states is not None,
        "depth": task.watch.depth,
        "watch_temperature": task.watch.watch_temperature,
    }
    console.print(f"{len(learnt):,} documents to learn from, {len(watched):,} to watch", style="cyan")
    reads = task.data.capture or task.data.states
    captured = _captured(task, learner, target, learnt) if reads else None
    batches = Batches(
        learnt, batch_size=settings.batch_size, max_length=settings.max_length, seed=settings.seed, captured=captured
    )
    watch = Evaluation(
        watched,
        depth=task.watch.depth,
        max_length=settings.max_length,
        temperature=1 if task.watch.watch_temperature else 0,
        decode=_decode(plan, task, target, tokenizer, watched, settings.max_length),
    )
    with _shown() as show:
        done = train(learner, batches, settings, task.out, watch, show, about=about)
    findings = learner.findings(done.out, watch.batches()) if processes.is_first() else {}
    return _record(task, done) | dict(findings) if processes.is_first() else {}


def computing_dtype(own: torch.dtype, task: TrainTask, target: PreTrainedModel, device: torch.device) -> torch.dtype:
    """What the target of a training computes in: float32 for one in bfloat16 on a CPU that has no products in bfloat16,
    if its weights then take less than half of the free memory. Captured states keep the target's own dtype.
    """
    slow = device.type == "cpu" and own == torch.bfloat16 and not keeps_bits(device, own)
    if not slow or task.data.capture or task.data.states:
        return own
    free = free_bytes(device)
    return torch.float32 if free is not None and 8 * num_parameters(target) < free else own


def _decode(
    plan: TrainPlan,
    task: TrainTask,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    watched: Sequence[Document],
    max_length: int,
) -> Callable[[Learner], float] | None:
    """What decodes held-out prompts at every measurement; None: nothing does."""
    if not task.watch.watch_prompts:
        return None
    prompts = DecodedPrompts(
        target,
        tokenizer,
        watched,
        drafter=plan.name,
        count=task.watch.watch_prompts,
        depth=task.watch.depth,
        temperature=task.watch.watch_temperature,
        max_length=max_length,
    )
    return prompts.block_efficiency


def _estimated(plan: TrainPlan, task: TrainTask, settings: TrainSettings, device: torch.device) -> str:
    """The memory and the hours that a run will take: from configs, a few documents and the time of a matrix product."""
    regenerated, data = plan.regenerated, task.data
    limit = SAMPLE if data.limit is None else min(SAMPLE, data.limit)
    tokenizer = open_tokenizer(task.target, what="model")
    documents = read_documents(data.data, tokenizer, part=_part(data), limit=limit, prompts=regenerated)
    answer = max(1, settings.max_length // 2) if regenerated else 0
    lengths = [min(len(each.tokens) + answer, settings.max_length) for each in documents]
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(str(settings.precision))
    work = Work(
        rows=min(settings.micro_batch_size or settings.batch_size, max(1, settings.batch_size // processes.count())),
        length=max(lengths),
        chunk=CHUNK,
        activation_bytes=4 if half is None else 2,
        num_shards=processes.num_shards(),
    )
    config = open_config(task.target)
    own = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    target, advice = skeleton(config).eval(), None
    target_bytes = computing_dtype(own, task, target, device).itemsize
    if task.drafter is None:
        # A head that is on disk is read as it is.
        with nullcontext() if plan.about.get("init_from") else torch.device("meta"):
            learner = plan.learner(
                HeadContext(
                    target=target,
                    documents=documents,
                    depth=task.watch.depth,
                    max_length=settings.max_length,
                    device=torch.device("meta"),
                )
            )
        needed = head_estimate(cast(HeadObjective, learner), target, work, target_bytes=target_bytes)
        advice = output_layer_advice(cast(HeadObjective, learner), needed)
    else:
        needed = estimate(open_config(task.drafter), target, work, target_bytes=target_bytes)
    rate = operations_per_second(device, half or torch.float32)
    tokens = settings.steps * settings.batch_size * sum(lengths) / len(lengths)
    hours = tokens / 1e6 * needed.hours_per_million(rate * EFFICIENCY) / processes.count()
    time = f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.1f} minutes ({hours:.2g} hours)"
    answers = ", without the target's answers," if regenerated else ""
    text = (
        f"{needed}\nabout {time} for {settings.steps:,} steps of {tokens / settings.steps:,.0f} tokens{answers} at "
        f"{EFFICIENCY:.0%} of the {rate / 1e9:,.0f} billion operations a second that a matrix product reaches here"
    )
    return text if advice is None else f"{text}\n{advice}"


def _documents(
    plan: TrainPlan, task: TrainTask, tokenizer: PreTrainedTokenizerBase | None, *, console: Console
) -> tuple[Sequence[Document], Sequence[Document]]:
    """The documents to learn from, and those to watch."""
    data, part = task.data, _part(task.data)
    # What is longer than the target's context cannot be captured as a whole.
    most = Anatomy.of(open_config(task.target)).longest_context if data.capture else None
    if plan.regenerated:
        corpus = read_documents(_answers(task, console), tokenizer, max_tokens=most)
    else:
        corpus = read_documents(data.data, tokenizer, part=part, limit=data.limit, max_tokens=most)
        console.print(f"{', '.join(data.data)}: {corpus.taken_for}", style="cyan")
    if data.held_out:
        return corpus, read_documents(
            data.held_out, tokenizer, part=replace(part, split=data.held_out_split or data.split)
        )
    return hold_out(corpus, HELD_OUT, seed=task.settings.seed)


def _part(data: DataOptions) -> DatasetPart:
    """The part of the corpus to read, and what it calls its fields."""
    return DatasetPart(split=data.split, config=data.subset, columns=data.columns)


def _answers(task: TrainTask, console: Console) -> Path:
    """The file of the target's answers to the prompts of the corpus. The first process of each machine writes it."""
    folder, data, part = task.out / FOLDER, task.data, _part(task.data)
    make_folder(folder)
    if processes.is_first_of_machine():
        drafter = "suffix" if task.drafter is None else f"model:path={task.drafter}"
        engine = assemble(Setup(target=task.target, drafter=drafter, device=task.settings.device))
        width = engine.parts.target.vocab_size
        corpus = read_documents(
            data.data, engine.tokenizer, part=part, limit=data.limit, prompts=True, vocab_size=width
        )
        wanted = max(1, task.settings.max_length // 2)
        generation = AnswerOptions(sampling=Sampling(seed=task.settings.seed), max_new_tokens=wanted)
        console.print(f"{', '.join(data.data)}: {corpus.taken_for}", style="cyan")
        console.print(f"the target answers {len(corpus):,} prompts", style="cyan")
        done = regenerate(engine, corpus, folder / ANSWERS, generation)
        if done.failed:
            console.print(f"{len(done.failed):,} prompts have no answer", style="red")
    processes.wait()
    return folder / ANSWERS


def _captured(task: TrainTask, learner: Learner, target: PreTrainedModel, documents: Sequence[Document]) -> HasStates:
    """The target's states along the corpus, as vLLM has written them, or captured here. The first process of each
    machine captures those that are not there.
    """
    if not learner.captured_taps:
        raise InputError(
            "capture needs texts that stay as they are and a loss that reads the target; leave out capture, on_policy "
            "and ce"
        )
    if task.data.states is not None:
        wanted, layers = learner.captured_taps, task.data.states_layers
        states = VllmStates.open(Path(task.data.states), layers=layers, wanted=wanted, documents=documents)
        states.check(target, documents)
        return states
    folder = task.out / FOLDER / STATES
    if processes.is_first_of_machine():
        with progress.task("capturing states", len(documents), "documents") as bar:
            capture(target, documents, Contents(taps=learner.captured_taps), out=folder, progress=bar.reach)
    processes.wait()
    return Captured.open(folder, model=target, documents=documents)


@contextmanager
def _shown() -> Iterator[Callable[[Progress], None]]:
    """Shows the steps, with the loss, the last measurement and the time left."""
    with progress.task("learning", unit="steps") as bar:

        def show(now: Progress) -> None:
            bar.what = f"learning, {now.seconds_left or 0:.0f} s left"
            if now.loss is not None:
                bar.what += f", loss {now.loss:.4f}"
            if now.watched is not None:
                bar.what += f", block efficiency {now.watched.block_efficiency:.3f}"
            bar.reach(now.step, now.steps)

        yield show


def _record(task: TrainTask, done: Trained) -> dict[str, Any]:
    """What was reached."""
    lines = read(done.log)
    watched = [line for line in lines if line["kind"] == "watch"]
    record: dict[str, Any] = {"out": str(done.out), "step": done.step, "log": str(done.log)}
    if watched:
        kept = next((line for line in watched if line["step"] == done.step), watched[-1])
        names = ("block_efficiency", "block_efficiency_greedy")
        judged = names[0] if task.watch.watch_temperature else names[1]
        first, *later = (line[judged] for line in watched)
        record |= {"before": {name: watched[0][name] for name in names}, "after": {name: kept[name] for name in names}}
        if "block_efficiency_decoded" in kept:
            record["decoded"] = [line.get("block_efficiency_decoded") for line in watched]
        record |= {"improved": kept[judged] > first, "score_before": first, "score_later": max(later, default=first)}
    return record
