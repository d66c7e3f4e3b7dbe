"""outrider learn: a drafter learns from a log of prompts and answers, and a running server gets its new weights."""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.core import progress
from outrider.core.inputs import InputError, text_of
from outrider.core.option import CheckedOptions, option
from outrider.training.loop.settings import TrainSettings
from outrider.training.options import DataOptions, WatchOptions

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.serve.client.remote import Remote
    from outrider.training.task import TrainTask
else:
    Console = Remote = TrainTask = object

LEAST_ANSWERS = 2
"""Fewest answers that something can be learnt from: one to learn, one to watch."""


@dataclass(frozen=True, kw_only=True)
class LearnSettings(TrainSettings):
    """How a drafter is trained on. It begins from what it knows, so it takes fewer and smaller steps than a new one."""

    steps: int = 100
    learning_rate: float = 1e-4
    warmup: int = 5
    batch_size: int = 8
    watch_every: int = 50


@dataclass(frozen=True, kw_only=True)
class SourceOptions(CheckedOptions):
    """Whose answers a drafter learns from, and who gets it.

    Attributes:
        url: The server that gets the new weights; by default the one of --from.
        admin_key: The server's admin key, for its answers and for the new weights; of a vLLM its key, if it has one.
        limit: Learn from the last so many answers.
        swap: Give the server the new weights if they accept more on held-out answers; `--no-swap` keeps them here.
    """

    url: str | None = None
    admin_key: str | None = None
    limit: int | None = option(None, least=LEAST_ANSWERS)
    swap: bool = True


@dataclass(frozen=True, kw_only=True)
class LearnTask:
    """What learns from what.

    Attributes:
        source: A server's URL, or a file of JSON lines.
        target: The target that gave the answers.
        drafter: The drafter, as --drafter has it, such as `model:path=DIR` or `eagle3:path=DIR`.
        out: A new folder for the drafter that has learnt.
    """

    source: str
    options: SourceOptions
    target: str
    drafter: str
    out: Path
    settings: TrainSettings
    watch: WatchOptions

    @property
    def server(self) -> str | None:
        """The URL of the server that gets the weights; None: there is none."""
        source_url = self.source if is_url(self.source) else None
        return self.options.url or source_url

    def remote(self, url: str) -> Remote:
        """A server, with the admin key."""
        from outrider.serve.client.remote import Remote

        return Remote(url=url, key=self.options.admin_key)


def is_url(source: str) -> bool:
    """Whether a source is a server.

    Example:
        >>> is_url("http://127.0.0.1:8000"), is_url("answers.jsonl")
        (True, False)
    """
    return source.startswith(("http://", "https://"))


def learn(task: LearnTask) -> Callable[[Console], dict[str, Any]]:
    """The work: read the answers, train, and give the server the weights. It returns what was reached.

    Raises:
        InputError: There are no answers, the drafter cannot learn, or the server takes no weights.
    """
    train = learner_of(task.drafter)
    keyless = task.server if task.options.swap and task.options.admin_key is None else None
    # A vLLM keeps no answers, and its routes for weights ask for no key.
    if keyless is not None and (is_url(task.source) or _is_ours(task.remote(keyless))):
        raise InputError("new weights need the server's admin key; give --admin-key, or --no-swap to keep them here")
    lessons = lessons_from(task)

    def work(console: Console) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="outrider-") as scratch:
            data = Path(scratch) / "answers.jsonl"
            data.write_text("".join(json.dumps(each) + "\n" for each in lessons), encoding="utf-8")
            console.print(f"{len(lessons):,} answers from {task.source}", style="cyan")
            record = train(task, DataOptions(data=(str(data),)), console)
        if record and task.options.swap and task.server is not None:
            record["swapped"] = bool(record.get("improved")) and swapped(task)
            if not record.get("improved"):
                console.print("the server keeps its weights, because the new ones accept no more", style="cyan")
        return record

    return work


def lessons_from(task: LearnTask) -> list[dict[str, Any]]:
    """What the source holds, as records of a corpus. Raises InputError where there is too little."""
    from outrider.serve.client.remote import RemoteError
    from outrider.serve.observe.answers_log import ROUTE, lessons_of

    if is_url(task.source):
        try:
            text = task.remote(task.source).text(ROUTE)
        except RemoteError as error:
            if error.status != 404:
                raise
            raise InputError(
                f"{task.source} keeps no answers; start it with `outrider serve --log-answers FILE`, or name a file of "
                "answers with --from, such as the log of a gateway before a vLLM"
            ) from error
    else:
        text = text_of(Path(task.source), "log of answers", "a file of JSON lines")
    lessons = [lesson for line in _lines(text, task.source) for lesson in lessons_of(line)]
    lessons = lessons[-task.options.limit :] if task.options.limit is not None else lessons
    if len(lessons) < LEAST_ANSWERS:
        raise InputError(
            f"{task.source} holds {len(lessons)} answers that a drafter can learn from, and learning needs at least "
            f"{LEAST_ANSWERS}; let the server answer more"
        )
    return lessons


def _lines(text: str, source: str) -> Iterator[dict[str, Any]]:
    """The objects of JSON lines. A last line that is half-written is left out: the server may be writing it."""
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                return
            raise InputError(f"line {number} of {source} is no JSON") from error
        if not isinstance(content, dict):
            raise InputError(f"line {number} of {source} is no JSON object")
        yield content


def learner_of(drafter: str) -> Callable[[LearnTask, DataOptions, Console], dict[str, Any]]:
    """What trains a drafter on. Raises InputError for one that has nothing to train."""
    with progress.importing():
        from outrider import catalog
        from outrider.heads.spec import HeadSpec
        from outrider.training import task as training
        from outrider.training.options import DistillOptions

    part = catalog.make("drafter", drafter)
    name, path = catalog.name_of(part), str(getattr(part, "path", ""))
    spec = catalog.rows("drafter")[name].kind
    if name == "model":
        return lambda task, data, console: training.distill(
            DistillOptions(), replace(_train_task(task, data), drafter=path), console
        )
    if isinstance(spec, HeadSpec) and spec.options is not None:
        options = spec.options(init_from=path)
        return lambda task, data, console: training.train_head(spec, options, _train_task(task, data), console)
    raise InputError(
        f"the drafter {name} cannot be trained on; learning needs a draft model or a head, such as model:path=DIR"
    )


def _train_task(task: LearnTask, data: DataOptions) -> TrainTask:
    from outrider.training.task import TrainTask

    return TrainTask(target=task.target, out=task.out, settings=task.settings, data=data, watch=task.watch)


def swapped(task: LearnTask) -> bool:
    """Give the server the new weights. Returns True; raises InputError where it does not take them."""
    from urllib.parse import quote

    from outrider import catalog
    from outrider.serve.vllm.weights import WeightRoutes

    remote = task.remote(str(task.server))
    name = catalog.name_of(catalog.make("drafter", task.drafter))
    with tempfile.TemporaryDirectory(prefix="outrider-") as scratch:
        if _is_ours(remote):
            remote.put(f"/v1/admin/drafter/{quote(name)}/weights", _weights(task, name, None))
        else:
            # A vLLM reads the file itself.
            WeightRoutes(remote).renew(_weights(task, name, Path(scratch) / "drafter"), version=task.out.name)
    print(f"{task.server} drafts with the new weights", file=sys.stderr)
    return True


def _is_ours(remote: Remote) -> bool:
    """Whether a server is Outrider's; vLLM has no such route."""
    from outrider.serve.client.remote import RemoteError

    try:
        remote.text("/live")
    except RemoteError as error:
        if error.status is None:
            raise
        return False
    return True


def _weights(task: LearnTask, name: str, exported: Path | None) -> Path:
    """The file of weights for a server.

    Args:
        exported: Where a head goes as vLLM reads it; None for Outrider's own engine.
    """
    from outrider.handoff.export import export
    from outrider.handoff.order import ExportRequest
    from outrider.serve.run.renewal import WEIGHTS

    place = task.out
    if exported is not None and name != "model":
        drafter = f"{name}:path={task.out}"
        export(ExportRequest(to="vllm", target=task.target, drafter=drafter, out=exported, measure=False))
        place = exported
    if not (place / WEIGHTS).is_file():
        raise InputError(f"{place} has no single file {WEIGHTS}, and a server takes one; restart it with the folder")
    return place / WEIGHTS
