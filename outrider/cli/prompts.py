"""Prompts of a command: from options, a file or standard input; texts or JSON lines."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from outrider.cli.printed import print_line
from outrider.cli.request import RequestOptions
from outrider.core.conversations import FIELDS, RecordShape, conversation_of, taken_for
from outrider.core.inputs import InputError, parse_json, text_of
from outrider.core.ranks import is_first
from outrider.embedded import ASSETS
from outrider.engine.prompts import BESIDE_MESSAGES, Prompt

STANDARD_INPUT = Path("-")
KEYS = FIELDS
"""What an object of JSON lines holds one of."""
WANTED = "a JSON object with `prompt`, a text, or `turns`, a list of texts, or `messages` with role and content"

OPTIONS = {field.name for field in fields(RequestOptions)} - {*BESIDE_MESSAGES}
OPTIONS |= {"max_tokens", "n", "response_format", "tool_choice"}
"""What a line must not hold: options of requests are given for all prompts."""


@dataclass(frozen=True, kw_only=True)
class PromptEntry:
    """A prompt, or the error in its place.

    Attributes:
        place: Its name in messages.
        shape: What its line was taken for; None where it is a text.
    """

    place: str
    prompt: Prompt | None = None
    shape: RecordShape | None = None
    error: InputError | None = None


def entries(texts: Sequence[str], file: Path | None) -> list[PromptEntry]:
    """The prompts: from options, else from a file, else from standard input. At a terminal, where nothing was named, it
    is one that ships with Outrider.
    """
    if texts and file is not None:
        raise InputError("--prompt and --prompt-file were given together; give one of them")
    if texts:
        return [PromptEntry(place=f"prompt {number}", prompt=text) for number, text in enumerate(texts, 1)]
    if file == STANDARD_INPUT or (file is None and (sys.stdin is None or not sys.stdin.isatty())):
        text = piped()
        if not text:
            raise InputError("there is no prompt: standard input is empty; give --prompt or --prompt-file")
        return _named(_lines(text), "standard input") if is_lines(text) else [_text(text, "standard input")]
    if file is not None:
        text = text_of(file, "prompt", "a text file or JSON lines")
        if not text.rstrip("\r\n"):
            raise InputError(f"the prompt file {file} is empty; write a text into it, or give --prompt ''")
        if file.suffix != ".jsonl":
            return [_text(text, str(file))]
        # Nobody asks what the prompts that ship with Outrider are.
        return _lines(text) if file.parent == ASSETS else _named(_lines(text), str(file))
    return _lines((ASSETS / "prompts.jsonl").read_text(encoding="utf-8"))[:1]


def piped() -> str:
    """All of standard input; nothing if it is closed."""
    if sys.stdin is None:
        return ""
    try:
        return sys.stdin.read().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not UTF-8 text: {error.reason} at byte {error.start}") from error


def is_lines(text: str) -> bool:
    """Whether a text is JSON lines: its first line is an object with a prompt in it.

    Example:
        >>> is_lines('{"prompt": "Once"}'), is_lines('{"name": "Tim",'), is_lines("Once upon a time")
        (True, False, False)
    """
    try:
        entry = json.loads(text.lstrip().partition("\n")[0])
    except (json.JSONDecodeError, RecursionError):
        return False
    except ValueError:
        # JSON with a number that Python cannot hold; reading the line says so.
        return True
    return isinstance(entry, dict) and any(key in entry for key in KEYS)


def read_file(file: Path) -> list[Prompt]:
    """Prompts of a text file, which is one, or of JSON lines. Raises InputError for the first that is none."""
    return [_prompt_of(entry) for entry in entries((), file)]


def _named(entries: list[PromptEntry], place: str) -> list[PromptEntry]:
    """The entries of a file, once it was said on standard error what the conversations in it were taken for."""
    counts = Counter(each.shape for each in entries if each.shape is not None)
    if any(shape.meaning for shape in counts) and is_first():
        print_line(f"{place}: {taken_for(counts, answers_first=True)}")
    return entries


def read_prompts(text: str) -> list[Prompt]:
    """Prompts of JSON lines: a text is continued, a conversation is answered. Raises InputError for the first that is
    none.
    """
    return [_prompt_of(entry) for entry in _lines(text)]


def _prompt_of(entry: PromptEntry) -> Prompt:
    if entry.prompt is None:
        raise entry.error or InputError(f"{entry.place} is empty")
    return entry.prompt


def _text(text: str, place: str) -> PromptEntry:
    """A text as a prompt, without the line end behind it."""
    return PromptEntry(place=place, prompt=text.removesuffix("\n").removesuffix("\r"))


def _lines(text: str) -> list[PromptEntry]:
    """The entries of JSON lines."""
    entries: list[PromptEntry] = []
    # Not by splitlines, which also parts lines at characters that may stand in JSON strings.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            place = f"line {number} of the prompts"
            try:
                entries.append(_entry(line, place))
            except InputError as error:
                entries.append(PromptEntry(place=place, error=error))
    if not entries:
        raise InputError("the prompt file is empty; give JSON lines with `prompt` or `turns`")
    return entries


def _entry(line: str, place: str) -> PromptEntry:
    """One line of JSON lines."""
    entry = parse_json(line, place)
    forms = {key: entry[key] for key in KEYS if entry.get(key) is not None} if isinstance(entry, dict) else {}
    if len(forms) != 1:
        raise InputError(f"{place} is not {WANTED}")
    if options := sorted(OPTIONS.intersection(entry)):
        raise InputError(f"{place} holds {options[0]!r}, an option for all prompts; give it on the command line")
    arguments = {key: entry[key] for key in BESIDE_MESSAGES if entry.get(key) is not None}
    try:
        conversation = conversation_of(entry)
    except InputError as error:
        raise InputError(f"{place} is not {WANTED}: {error}") from error
    if conversation is None:
        if arguments:
            raise InputError(f"{place} holds {min(arguments)!r}, which belongs to messages, beside a prompt")
        return PromptEntry(place=place, prompt=str(forms["prompt"]))
    messages = list(conversation.messages)
    return PromptEntry(
        place=place,
        prompt={"messages": messages, **arguments} if arguments else messages,
        shape=conversation.shape,
    )
