"""The commands below `outrider train`; those of heads are made from the catalog. Each imports its code when it runs."""

import ast
import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.main
from rich.console import Console

from outrider import catalog
from outrider.cli.failure import INTERRUPTED, complain
from outrider.cli.help import App, Command, Commands
from outrider.cli.options import Json, with_options
from outrider.cli.request import RequestOptions
from outrider.core import files, progress
from outrider.core.destination import locked_file
from outrider.core.inputs import InputError, needs
from outrider.core.launched import launched_first
from outrider.setup import Setup
from outrider.training.loop.settings import TrainSettings
from outrider.training.options import NOT_OF_PROMPTS, DataOptions, DistillOptions, SteerOptions, WatchOptions

OF_ANSWERS = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
"""Options of requests that answers for training have."""
NOT_OF_ANSWERS = sorted(set(RequestOptions.__dataclass_fields__) - set(OF_ANSWERS))
"""Options of requests that they lack."""
NOT_OF_DRAFT_MODELS = ("init_from", "slot_balanced")
"""Options of heads that draft models lack."""
Target = Annotated[str, typer.Option(help="The target: a directory, a GGUF file or a hub id.")]
Out = Annotated[
    Path, typer.Option(help="Folder for the drafter. If it holds this run, the run goes on where it stopped.")
]
Begun = Annotated[str, typer.Option(help="The draft model to begin from, with the target's tokenizer.")]
Estimate = Annotated[bool, typer.Option("--estimate", help="Print the memory and the hours that it takes, and stop.")]
MAX_NEW_TOKENS = 256
"""Most tokens of an answer, by default."""
SHOWN = 3
"""Most prompts without an answer that are named."""
REPORT = "report.html"
"""The page of a run, beside its log."""
KNOWN = {"out", "step", "log", "before", "after", "improved", "score_before", "score_later", "report"}
KNOWN |= {"swapped", "decoded"}
"""What is told of every run; the rest was found out about its drafter."""


class HeadCommand(Command):
    """The command of a head. Its options are those of the head's spec, which is imported when the command is called."""

    def __init__(self, drafter: str, home: str, help: str) -> None:
        super().__init__(drafter, help=help, rich_markup_mode=None)
        self._home = home

    def make_context(self, *arguments: Any, **settings: Any) -> Any:
        """The context of the command with all its options."""
        return self._whole.make_context(*arguments, **settings)

    @functools.cached_property
    def _whole(self) -> Any:
        """The command with all its options."""
        with _training():
            spec = catalog.rows("drafter")[str(self.name)].kind

        def command(
            settings: TrainSettings,
            texts: DataOptions,
            watch: WatchOptions,
            options: spec.options,
            target: Target,
            out: Out,
            estimate: Estimate = False,
            as_json: Json = False,
        ) -> None:
            with _training():
                from outrider.training.task import TrainTask, train_head

            task = TrainTask(target=target, out=out, settings=settings, data=texts, watch=watch, estimate=estimate)
            run_training(spec.name, functools.partial(train_head, spec, options, task), as_json)

        one = App(name=str(self.name))
        one.command(self.name, help=self.help)(with_options()(command))
        return typer.main.get_command(one)


class TrainCommands(Commands):
    """The commands of training, with one for each head that is trained."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, row in catalog.rows("drafter").items():
            if (help := _help_of(row.home)) is not None:
                self.add_command(HeadCommand(name, row.home, help))


def help_in(words: str | None) -> str:
    """What a class's docstring says before its attributes."""
    return inspect.cleandoc(words or "").partition("\n\nAttributes:")[0]


train = App(name="train", help="Train drafters, and make the data for it.", cls=TrainCommands)


@train.command()
@with_options(without=(*NOT_OF_ANSWERS, *NOT_OF_PROMPTS))
def data(
    setup: Setup,
    request: RequestOptions,
    texts: DataOptions,
    out: Annotated[
        Path, typer.Option(help="A file of JSON lines. Answers in the file are kept, and the rest is added to it.")
    ],
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a text without a prompt that become the prompt.")] = 32,
    as_json: Json = False,
) -> None:
    """Let the target answer the prompts of a corpus, through the engine, to a file that a drafter can be trained on.

    A prompt is what stands before an answer, or the beginning of a text. A run that was killed continues where it
    stopped.
    """
    with locked_file(out):
        _answer(setup, request, texts, out, prompt_tokens, as_json)


def _of_draft_models(command: str, name: str, kind: Any, without: Collection[str] = ()) -> None:
    """Add the command that trains a draft model in a way, with the options of the way.

    Args:
        name: The drafter's name in the catalog.
    """

    def run(
        settings: TrainSettings,
        texts: DataOptions,
        watch: WatchOptions,
        options: kind,
        target: Target,
        drafter: Begun,
        out: Out,
        estimate: Estimate = False,
        as_json: Json = False,
    ) -> None:
        with _training():
            from outrider.training import task as training

        task = training.TrainTask(
            target=target, drafter=drafter, out=out, settings=settings, data=texts, watch=watch, estimate=estimate
        )
        run_training(name, functools.partial(getattr(training, command), options, task), as_json)

    lacking = with_options(without=(*without, *NOT_OF_DRAFT_MODELS))
    train.command(command, help=help_in(kind.__doc__))(lacking(run))


_of_draft_models("distill", "model", DistillOptions, without=("regenerate",))
_of_draft_models("steer", "steered", SteerOptions)


def _answer(
    setup: Setup, request: RequestOptions, texts: DataOptions, out: Path, prompt_tokens: int, as_json: bool
) -> None:
    """Answer the prompts, and print what was done."""
    with _training():
        from outrider.cli.opened import opened
        from outrider.cli.printed import note_room, print_json
        from outrider.training.data.records import read_documents
        from outrider.training.data.regenerate import AnswerOptions, regenerate
        from outrider.training.data.sources import DatasetPart, records

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    part = DatasetPart(split=texts.split, config=texts.subset, columns=texts.columns)
    for source in texts.data:
        # Wrong places are told before the target is read.
        next(records(source, part), None)
    engine = opened(setup)
    generation = AnswerOptions(
        sampling=request.sampling(engine.sampling),
        max_new_tokens=request.max_new_tokens or MAX_NEW_TOKENS,
        prompt_tokens=prompt_tokens,
    )
    note_room(engine, request.max_new_tokens)
    width = engine.parts.target.vocab_size
    corpus = read_documents(texts.data, engine.tokenizer, part=part, limit=texts.limit, prompts=True, vocab_size=width)
    if not as_json:
        console.print(f"{', '.join(texts.data)}: {corpus.taken_for}", style="cyan")
        console.print(f"{corpus}", style="cyan")
    with nullcontext() if as_json else progress.shown(), progress.task("answering", len(corpus), "prompts") as bar:
        try:
            done = regenerate(
                engine, corpus, out, generation, progress=lambda run: bar.reach(run.num_done, run.num_prompts)
            )
        except KeyboardInterrupt:
            print(f"interrupted; the same command continues {out}", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
    for number, failure in list(done.failed.items())[:SHOWN]:
        complain(InputError(f"prompt {number} has no answer: {failure}"))
    report = {
        "prompts": done.num_prompts,
        "kept": done.num_kept,
        "answers": done.num_answers,
        "tokens": done.num_tokens,
        "failed": len(done.failed),
        "out": str(out),
    }
    if as_json:
        print_json(report)
        return
    failed = f"; {len(done.failed)} prompts have no answer" if done.failed else ""
    kept = f", {done.num_kept} were there before" if done.num_kept else ""
    console.print(f"{done.num_answers} answers with {done.num_tokens} tokens in {out}{kept}{failed}", style="cyan")


def run_training(name: str, work: Callable[[Console], dict[str, Any]], as_json: bool) -> None:
    """Do the work with progress on standard error, and print what was reached.

    Args:
        name: The drafter's name in the catalog.
    """
    from outrider.cli.opened import tell_loading
    from outrider.cli.printed import print_json

    tell_loading()
    # The training chooses its device, and only then do processes find each other.
    main = launched_first()
    console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=as_json or not main)
    with nullcontext() if console.quiet else progress.shown(f"training {name}"):
        record = work(console)
    if not main:
        return
    if "log" in record:
        try:
            record["report"] = str(_report(Path(record["out"]), Path(record["log"])))
        except ModuleNotFoundError as error:
            complain(needs("the report", str(error.name), "bench"))
        except InputError as error:
            complain(error)
    if as_json:
        print_json(record)
        return
    if "out" not in record:
        return
    if "before" in record:
        _tell_acceptance(record, console)
    if "decoded" in record:
        rates = ", ".join(f"{each:.3f}" for each in record["decoded"])
        console.print(f"tokens per step when held-out prompts are decoded, by measurement: {rates}", style="cyan")
    for what in record.keys() - KNOWN:
        console.print(f"{what}: {record[what]}", style="cyan")
    console.print(f"the drafter is in {record['out']}; use it with --drafter {name}:path={record['out']}", style="cyan")


def _report(out: Path, log: Path) -> Path:
    """Write the report of a run beside its log. Returns its place."""
    from outrider.bench.training_report import page
    from outrider.training.loop.journal import read

    place = log.with_name(REPORT)
    files.replace(place, page(out.name, read(log)).encode())
    return place


def _tell_acceptance(record: dict[str, Any], console: Console) -> None:
    """Print whether the drafter became better."""
    before, after, step = record["before"], record["after"], record["step"]
    if record["improved"]:
        console.print(
            f"block efficiency on held-out texts: {before['block_efficiency']:.3f} before, "
            f"{after['block_efficiency']:.3f} after {step} steps; at temperature 0 "
            f"{before['block_efficiency_greedy']:.3f} and {after['block_efficiency_greedy']:.3f}",
            style="cyan",
        )
        return
    held = f"after {step} steps" if step else "as it was before training"
    console.print(
        "training did not make the drafter better: block efficiency on held-out texts was "
        f"{record['score_before']:.3f} before and at most {record['score_later']:.3f} after; {record['out']} holds the "
        f"drafter {held}. Try a lower --learning-rate, more --steps or more --data",
        style="red",
    )


@contextmanager
def _training() -> Iterator[None]:
    """Say which library is missing. Raises InputError if one is."""
    try:
        with progress.shown("loading the libraries of training"):
            yield
    except ModuleNotFoundError as error:
        raise needs("training", str(error.name), "train") from error


def _help_of(home: str) -> str | None:
    """The help of a head's command, from the file of its spec, without importing it; None: the head is not trained."""
    module, _, name = home.partition(":")
    module_spec = find_spec(module)
    tree = ast.parse(Path(str(module_spec and module_spec.origin)).read_text(encoding="utf-8"))
    specs = [
        each.value
        for each in tree.body
        if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call) and ast.unparse(each.targets[0]) == name
    ]
    options = next((ast.unparse(word.value) for spec in specs for word in spec.keywords if word.arg == "options"), None)
    classes = (each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == options)
    return next((help_in(ast.get_docstring(each)) for each in classes), None)
