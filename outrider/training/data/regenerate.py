"""Answers of the target to the prompts of a corpus, by the engine, in a file that a later run can continue."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from outrider.core import files
from outrider.core.dice import numbered_seed
from outrider.core.option import check, option
from outrider.core.types import InputError, Sampling
from outrider.engine.engine import Engine
from outrider.engine.output import Output
from outrider.learning.batch import Document
from outrider.lm.fingerprint import fingerprint, weights_of
from outrider.training.data.documents import TOKEN

AHEAD = 2
"""Requests that wait or run at once, for each slot of the engine."""
BEGINNING = b'{"number": '
"""How every line of the file begins."""
DRAWING = [each.name for each in fields(Sampling) if each.name not in ("seed", "processors", "logit_bias")]
"""Settings of a request that a line of the file names."""


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How prompts are answered.

    Attributes:
        sampling: How tokens are drawn. Prompt `n` has a seed of its own, derived from `sampling.seed` and `n`; no seed
            counts as 0.
        max_new_tokens: Most tokens of an answer.
        prompt_tokens: Tokens of a text without a prompt that become the prompt.

    Raises:
        InputError: A number is too small, or the settings hold logits processors.
    """

    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = option(256, least=1)
    prompt_tokens: int = option(32, least=1)

    def __post_init__(self) -> None:
        check(self)
        if self.sampling.processors or self.sampling.logit_bias:
            raise InputError("answers for training are drawn without logits processors and logit_bias")

    def prompt(self, document: Document) -> Int[np.ndarray, " prompt"]:
        """The prompt of a document: what stands before its answer, or the beginning of a text."""
        beginning = min(self.prompt_tokens, max(1, len(document.tokens) - 1))
        return document.tokens[: document.start or beginning]

    def sampling_of(self, number: int) -> Sampling:
        """How the tokens of one answer are drawn."""
        return replace(self.sampling, seed=numbered_seed(self.sampling.seed or 0, number))

    def settings(self, engine: Engine) -> dict[str, Any]:
        """Everything but the prompt that an answer depends on. The drafter does not change its law."""
        lengths = {"max_new_tokens": self.max_new_tokens, "prompt_tokens": self.prompt_tokens}
        drawing = {name: getattr(self.sampling, name) for name in DRAWING}
        return {"target": target_of(engine), **lengths, "seed": self.sampling.seed or 0, **drawing}


@dataclass(frozen=True, kw_only=True)
class TargetAnswer:
    """One line of the file: a prompt and what the target said.

    Attributes:
        number: Of the prompt in the corpus.
        prompt_hash: Of the prompt's tokens.
        tokens: Prompt and answer.
        start: Index of the answer's first token.
        domain: The kind of text, where the corpus names one.
        finish_reason: Why the answer ended.
        settings: What made the answer.
    """

    number: int
    prompt_hash: str
    tokens: list[int]
    start: int
    domain: str | None
    finish_reason: str
    settings: dict[str, Any]

    def line(self) -> bytes:
        """The line of JSON. `read_documents` reads it as a document."""
        return (json.dumps(vars(self)) + "\n").encode()


@dataclass(kw_only=True)
class Regenerated:
    """What a run has done. Changes in place.

    Attributes:
        num_prompts: Prompts of the corpus.
        num_kept: Answers that the file held before.
        num_answers: Answers of this run.
        num_tokens: Tokens of these answers.
        failed: Error of each prompt that has no answer, by number.
    """

    num_prompts: int
    num_kept: int = 0
    num_answers: int = 0
    num_tokens: int = 0
    failed: dict[int, Exception] = field(default_factory=dict)

    @property
    def num_done(self) -> int:
        """Prompts that need nothing more."""
        return self.num_kept + self.num_answers + len(self.failed)


def regenerate(
    engine: Engine,
    documents: Sequence[Document],
    out: Path,
    generation: AnswerOptions,
    *,
    progress: Callable[[Regenerated], None] | None = None,
) -> Regenerated:
    """Let the target answer the prompts of a corpus. Each answer is appended to a file when it ends.

    A run that was killed continues where it stopped: answers in the file are kept, and a half-written last line is made
    anew. At the end the lines are put in the order of the prompts, so that a run with interruptions ends with the same
    file as a run without.

    Args:
        documents: The corpus.
        out: A file of JSON lines.
        progress: Called once at the beginning, and after each answer.

    Raises:
        InputError: The file cannot be written, holds something else, or was made with other prompts or settings.
    """
    settings = generation.settings(engine)
    places = _held(out, documents, generation, settings)
    run = Regenerated(num_prompts=len(documents), num_kept=len(places))
    if progress is not None:
        progress(run)
    with files.written(out), out.open("ab") as file:
        for number, ended in _answers(engine, documents, generation, skip=set(places)):
            if isinstance(ended, Exception):
                run.failed[number] = ended
            else:
                prompt = generation.prompt(documents[number])
                answer = TargetAnswer(
                    number=number,
                    prompt_hash=_hash(prompt),
                    tokens=[*prompt.tolist(), *ended.tokens],
                    start=len(prompt),
                    domain=documents[number].domain,
                    finish_reason=ended.finish_reason,
                    settings=settings,
                )
                file.write(answer.line())
                file.flush()
                run.num_answers += 1
                run.num_tokens += len(ended.tokens)
            if progress is not None:
                progress(run)
    if run.failed and run.num_done == len(run.failed):
        raise InputError(f"no prompt could be answered; prompt {min(run.failed)}: {run.failed[min(run.failed)]}")
    _put_in_order(out)
    return run


def target_of(engine: Engine) -> str:
    """A hash of the weights of an engine's target."""
    modules = [weights_of(module) for module in engine.parts.target.modules.values()]
    return fingerprint(modules) or "unknown"


def _answers(
    engine: Engine, documents: Sequence[Document], generation: AnswerOptions, skip: set[int]
) -> Iterator[tuple[int, Output | Exception]]:
    """Outputs with the numbers of their prompts, as they end. A prompt that fails gives its error.

    The engine gets a few more prompts than it has slots, so that memory does not grow with the corpus.
    """
    waiting = (number for number in range(len(documents)) if number not in skip)
    running: dict[str, int] = {}
    exhausted = False
    try:
        while running or not exhausted:
            while not exhausted and len(running) < AHEAD * engine.max_slots:
                number = next(waiting, None)
                exhausted = number is None
                if number is not None:
                    prompt, sampling = generation.prompt(documents[number]).tolist(), generation.sampling_of(number)
                    try:
                        id = engine.add(prompt, sampling=sampling, max_new_tokens=generation.max_new_tokens)
                        running[id] = number
                    except InputError as error:
                        yield number, error
            for update in engine.step():
                if update.output is not None and update.id in running:
                    yield running.pop(update.id), update.output.error or update.output
    finally:
        for id in running:
            engine.cancel(id)


def _held(
    out: Path, documents: Sequence[Document], generation: AnswerOptions, settings: dict[str, Any]
) -> dict[int, int]:
    """The prompts whose answers a file holds, and where their lines begin. A half-written last line is cut off."""
    if not out.exists():
        with files.written(out):
            out.parent.mkdir(parents=True, exist_ok=True)
        return {}
    places: dict[int, int] = {}
    end = 0
    with files.written(out), out.open("r+b") as file:
        for count, line in enumerate(file, 1):
            if not line.endswith(b"\n") and (BEGINNING.startswith(line) or line.startswith(BEGINNING)):
                break
            number = _checked(line, f"line {count} of {out}", documents, generation, settings)
            places.setdefault(number, end)
            end += len(line)
        file.truncate(end)
    return places


def _checked(
    line: bytes, place: str, documents: Sequence[Document], generation: AnswerOptions, settings: dict[str, Any]
) -> int:
    """The prompt's number of a line that this run would have written."""
    try:
        answer = json.loads(line)
        number, prompt_hash, written = answer["number"], answer["prompt_hash"], dict(answer["settings"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{place} is no answer of `outrider train data`; give another file") from error
    if written != settings:
        name = next(name for name in {**settings, **written} if written.get(name) != settings.get(name))
        raise InputError(
            f"{place} was made with {name}={written.get(name)} and not {settings.get(name)}; give another file, or the "
            "settings that it was made with"
        )
    same = isinstance(number, int) and 0 <= number < len(documents)
    if not same or _hash(generation.prompt(documents[number])) != prompt_hash:
        raise InputError(
            f"{place} answers another prompt than number {number} of this corpus; give another file, or the corpus "
            "that it was made with"
        )
    return number


def _put_in_order(out: Path) -> None:
    """Sort the lines of a file by the numbers of their prompts, one line in memory at a time."""
    places: list[tuple[int, int]] = []
    with files.written(out), out.open("rb") as file:
        begin = 0
        for line in file:
            places.append((json.loads(line)["number"], begin))
            begin += len(line)
        ordered = sorted(dict(reversed(places)).items())
        if ordered == places:
            return
        with files.replaced(out) as fresh, fresh.open("wb") as sorted_file:
            for _, begin in ordered:
                file.seek(begin)
                sorted_file.write(file.readline())


def _hash(prompt: Int[np.ndarray, " prompt"]) -> str:
    return hashlib.blake2b(prompt.astype(TOKEN).tobytes(), digest_size=8).hexdigest()
