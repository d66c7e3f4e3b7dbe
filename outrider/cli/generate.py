"""outrider generate: stream one prompt, or run many, and report measurements."""

import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import typer

from outrider.cli.backend import Backend, opened_backend, support_of
from outrider.cli.failure import INTERRUPTED, WRONG_INPUT, complain
from outrider.cli.forwards import chosen
from outrider.cli.learn import LearnOptions, summary
from outrider.cli.outputs import OutputFile, Wanted, profile
from outrider.cli.printed import (
    note_room,
    print_json,
    print_line,
    print_measures,
    print_output,
    print_profile,
    why_few_drafts,
)
from outrider.cli.prompts import PromptEntry, entries
from outrider.cli.remote import RemoteOptions
from outrider.cli.request import RequestOptions
from outrider.cli.streamed import streamed
from outrider.core import progress
from outrider.core.destination import locked_file
from outrider.core.inputs import InputError
from outrider.core.option import Bounds
from outrider.core.ranks import is_first
from outrider.core.types import Sampling, Step
from outrider.engine.engine import Engine
from outrider.engine.generation import Generation
from outrider.engine.output import Output, Update, succeeded
from outrider.engine.prompts import Prompt
from outrider.engine.requests import check_count
from outrider.serve.vllm.options import EngineOptions
from outrider.setup import Setup


@dataclass(frozen=True, kw_only=True)
class GenerateTask:
    """What was asked for.

    Attributes:
        setup: The engine.
        request: Options of the requests.
        engine: Which engine runs.
        remote: A server that makes the outputs instead.
        texts: Prompts from options.
        file: A file of prompts.
        n: Outputs per prompt.
        logprobs: Number of likeliest tokens to record besides the emitted one; None records nothing.
        output: The file to which outputs are written as they end.
        as_json: Whether outputs are printed as JSON.
        profile: Whether the parts of a step's time are reported.
        compare: Whether plain decoding is measured too.
        learn: How the draft model learns.
    """

    setup: Setup
    request: RequestOptions
    engine: EngineOptions
    remote: RemoteOptions
    texts: Sequence[str]
    file: Path | None
    n: int
    logprobs: int | None
    output: Path | None
    as_json: bool
    profile: bool
    compare: bool
    learn: LearnOptions

    def __post_init__(self) -> None:
        check_count(self.n, 1)
        only_ours = {"profile": self.profile, "compare": self.compare}
        support_of(self.engine, self.remote).check(self.setup, self.learn, only_ours)
        Bounds(least=0).check("logprobs", self.logprobs)
        if self.logprobs is not None and not self.as_json and self.output is None:
            raise InputError("log-probabilities are in JSON only; give --json or --output, or leave out --logprobs")
        if self.setup.tp_plan is not None and (self.compare or self.learn.learn or self.output is not None):
            raise InputError(
                "with tp_plan several processes decode together, which cannot compare, learn or write one file; leave "
                "out --compare, --learn and --output (--json prints the outputs)"
            )
        if self.compare and (self.learn.learn_drafts or 1) > 1:
            raise InputError("--compare measures one draft model; leave out --compare or --learn-drafts")
        # Check the input before a model is loaded.
        self.learn.check(self.setup)
        self.request.sampling(Sampling())
        bound = self.request.constraint() is not None or self.request.tool_schemas() is not None
        if bound and self.compare:
            raise InputError("--compare measures plain texts; leave out --compare, or the grammar and the tools")
        if self.texts and self.file is not None:
            raise InputError("--prompt and --prompt-file were given together; give one of them")

    def wanted(self, prompts: Sequence[PromptEntry]) -> list[Wanted]:
        """The outputs to make."""
        settings = repr(sorted(self.request.options().items()))
        grammar = repr(self.request.constraint())
        shared: list[object] = [self.n, self.logprobs, str(self.setup.target), settings, grammar]
        shared += [self.request.tool_schemas()] if self.request.tools is not None else []
        shared += [self.remote.url, self.remote.model] if self.remote.url is not None else []
        outputs: list[Wanted] = []
        for number, entry in enumerate(prompts):
            text = json.dumps([entry.prompt, *shared], sort_keys=True)
            name = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
            outputs += [
                Wanted(prompt_index=number, sample_index=k, index=self.n * number + k, request=name)
                for k in range(self.n)
            ]
        return outputs


@dataclass(kw_only=True)
class TaskResults:
    """The results of a task so far; changes in place.

    Attributes:
        engine: What makes the outputs; None where another program does.
        outputs: Ended outputs.
        records: The same as objects of JSON.
        failed: Prompts that failed, with the reason.
        steps: Steps of each request, if they are reported.
    """

    task: GenerateTask
    engine: Engine | None = None
    outputs: list[Output] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    failed: dict[str, Exception] = field(default_factory=dict)
    steps: dict[str, list[Step]] = field(default_factory=lambda: defaultdict(list))

    @property
    def status(self) -> int:
        """The exit status."""
        return max((WRONG_INPUT if isinstance(e, InputError) else 1 for e in self.failed.values()), default=0)

    def keep(self, step: Step) -> None:
        """Note a step."""
        if self.task.profile:
            self.steps[step.request].append(step)

    def end(self, wanted: Wanted, output: Output) -> None:
        """Note an output, write it and print it."""
        record = wanted.record(output)
        if self.task.profile:
            forwards = {} if self.engine is None else chosen(self.engine)
            record["profile"] = profile(self.steps[output.id]) | {"forwards": forwards}
        if self.engine is not None and (why := why_few_drafts(self.engine, [output])) is not None:
            record["why_few_drafts"] = why
        if self.task.output is not None:
            OutputFile(path=self.task.output).add(record)
        self.outputs.append(output)
        self.records.append(record)
        if self.task.as_json and not self.task.compare:
            print_json(record)
        elif self.task.output is None and not self.task.as_json:
            print_output(wanted.index, output)


def run(task: GenerateTask) -> None:
    """Make the outputs, and print or write each as it ends."""
    prompts = entries(task.texts, task.file)
    check_count(task.n, len(prompts))
    with _held(task, prompts) as wanted:
        if wanted:
            _make(task, prompts, wanted)


@contextmanager
def _held(task: GenerateTask, prompts: Sequence[PromptEntry]) -> Iterator[list[Wanted]]:
    """The outputs that are still to be made. The file of outputs, if there is one, is held meanwhile."""
    wanted = task.wanted(prompts)
    if task.output is None:
        yield wanted
        return
    file = OutputFile(path=task.output)
    file.check()
    with locked_file(task.output):
        held = file.held(wanted)
        if held:
            print(f"{len(held)} of {len(wanted)} outputs are in {task.output} already", file=sys.stderr)
        yield [each for each in wanted if each.index not in held]


def _make(task: GenerateTask, prompts: Sequence[PromptEntry], wanted: Sequence[Wanted]) -> None:
    """Make the outputs that are wanted."""
    request = replace(task.request, max_new_tokens=task.request.max_new_tokens or Generation.max_new_tokens)
    with opened_backend(task.setup, request, task.engine, task.remote, divided=True) as backend:
        engine = backend.engine
        results = TaskResults(task=task, engine=engine)
        if engine is not None and engine.tokenizer is None:
            raise InputError("there is no tokenizer beside the target, and a text needs one; name it with --tokenizer")
        if engine is not None:
            note_room(engine, task.request.max_new_tokens)
        learning = None if engine is None else task.learn.begin(engine)
        try:
            if len(prompts) == len(wanted) == 1 and not task.as_json and task.output is None:
                _stream(backend, request, prompts[0], results)
            else:
                _together(backend, request, prompts, wanted, results)
                _complain_of(results)
        finally:
            if learning is not None:
                learning.finish()
        if learning is not None and results.outputs:
            print_line(summary(learning, results.outputs))
        _report(results, [entry.prompt for entry in prompts if entry.prompt and entry.place not in results.failed])
    raise typer.Exit(results.status)


def _stream(backend: Backend, request: RequestOptions, entry: PromptEntry, results: TaskResults) -> None:
    """Print one output as it is generated. An interrupt ends it and still prints the measurements."""
    if entry.prompt is None:
        raise entry.error or InputError(f"{entry.place} is empty")
    backend.add(entry.prompt, request, id="0", logprobs=results.task.logprobs)
    output: Output | None = None
    try:
        with streamed() as text:
            updates = _first(backend, results)
            if isinstance(entry.prompt, str):
                text.print(entry.prompt, style="dim")
            while output is None:
                for update in updates:
                    text.print(succeeded(update).text)
                    output = update.output
                updates = [] if output is not None else backend.step(results.keep)
    except KeyboardInterrupt:
        output = backend.cancel("0")
        count = 0 if output is None else len(output.tokens)
        print(f"interrupted after {count} tokens", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    results.outputs.append(output)


def _first(backend: Backend, results: TaskResults) -> list[Update]:
    """Read the prompt, and return the first updates."""
    updates: list[Update] = []
    with progress.shown(), progress.task("reading the prompt", backend.num_unread_tokens or None, "tokens") as reading:
        while not updates:
            updates = backend.step(results.keep)
            reading.reach((reading.total or 0) - backend.num_unread_tokens)
    return updates


def _together(
    backend: Backend,
    request: RequestOptions,
    prompts: Sequence[PromptEntry],
    wanted: Sequence[Wanted],
    results: TaskResults,
) -> None:
    """Run all requests together, with a progress bar on standard error. One that fails does not stop the others."""
    running = dict[str, Wanted]()
    with progress.shown(), progress.task("generating", len(wanted), "outputs") as bar:
        try:
            for each in wanted:
                entry = prompts[each.prompt_index]
                try:
                    if entry.prompt is None:
                        raise entry.error or InputError(f"{entry.place} is empty")
                    id, logprobs = str(each.index), results.task.logprobs
                    backend.add(entry.prompt, request, id=id, sample=each.sample_index, logprobs=logprobs)
                    running[id] = each
                except InputError as error:
                    results.failed[entry.place] = error
                    bar.advance()
            while backend.busy:
                for update in backend.step(results.keep):
                    if update.output is not None:
                        bar.advance()
                        ended = running[update.id]
                        if update.output.error is not None:
                            results.failed[prompts[ended.prompt_index].place] = update.output.error
                        else:
                            results.end(ended, update.output)
        except KeyboardInterrupt:
            print(f"interrupted after {len(results.outputs)} of {len(wanted)} outputs", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None


def _complain_of(results: TaskResults) -> None:
    """Print the prompts that have no output. If all fail for one reason, raise that error."""
    errors = list(results.failed.values())
    if errors and not results.outputs and len({str(error) for error in errors}) == 1:
        raise errors[0]
    for place, error in results.failed.items():
        reason = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        complain(InputError(reason if reason.startswith(place) else f"{place}: {reason}"))


def _report(results: TaskResults, prompts: Sequence[Prompt]) -> None:
    """Print the measurements."""
    task, engine = results.task, results.engine
    report = None
    if engine is not None and task.compare and results.outputs:
        from outrider.cli.compared import compared

        settings = task.request.sampling(engine.sampling)
        report = compared(engine, prompts, settings, task.request.max_new_tokens or Generation.max_new_tokens)
    if task.as_json:
        for record in results.records if report is not None else ():
            print_json(record | {"compare": report})
        return
    if results.outputs and is_first():
        print_measures(results.outputs, None if engine is None else why_few_drafts(engine, results.outputs))
    if engine is not None and task.profile:
        print_profile(profile([step for steps in results.steps.values() for step in steps]), chosen(engine))
    if report is not None:
        from outrider.cli.compared import print_comparison

        print_comparison(report)
