"""outrider chat: a conversation through the model's chat template. An engine keeps keys and values between turns."""

import re
import sys
import typing
import uuid
from dataclasses import dataclass, field, fields, replace
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from outrider.assembly import completed, tokenizer_of
from outrider.cli.backend import Backend, opened_backend, support_of
from outrider.cli.opened import tell_loading
from outrider.cli.options import kind_of
from outrider.cli.printed import note_room
from outrider.cli.remote import RemoteOptions
from outrider.cli.request import RequestOptions
from outrider.cli.streamed import streamed
from outrider.cli.supported import ENGINE
from outrider.core.inputs import InputError, unknown
from outrider.engine.output import Output, succeeded
from outrider.serve.vllm.options import EngineOptions
from outrider.setup import Setup

COMMANDS = {
    "/help": "list these commands",
    "/settings": "say how answers are drawn and where they end",
    "/set NAME VALUE": "change a setting, such as `/set temperature 0.7`; without VALUE it is as at the beginning",
    "/reset": "forget the conversation",
    "/quit": "leave",
}
MAX_NEW_TOKENS = 256
"""Most tokens of an answer, by default."""


@dataclass(kw_only=True)
class ChatState:
    """The messages of a chat and its settings; changes in place.

    Attributes:
        backend: What answers.
        opening: Messages before the conversation.
        messages: All messages so far.
        request: The current settings.
        first: The settings at the beginning.
    """

    backend: Backend
    opening: list[dict[str, str]]
    request: RequestOptions
    messages: list[dict[str, str]] = field(init=False)
    first: RequestOptions = field(init=False)

    def __post_init__(self) -> None:
        self.messages, self.first = list(self.opening), self.request

    @property
    def settings(self) -> dict[str, object]:
        """The values of all settings, by name."""
        sampling = self.request.sampling(self.backend.sampling)
        return {
            each.name: getattr(sampling, each.name, getattr(self.request, each.name)) for each in fields(self.request)
        }

    def set(self, name: str, text: str) -> None:
        """Change a setting. Raises InputError for an unknown setting or a wrong value."""
        hints = typing.get_type_hints(RequestOptions)
        if name not in hints:
            raise unknown("setting", name, hints)
        value: Any = getattr(self.first, name) if not text else _value(name, text, hints[name])
        changed = replace(self.request, **{name: value})
        changed.sampling(self.backend.sampling)
        changed.constraint()
        changed.tool_schemas()
        self.request = changed


def talk(
    setup: Setup, request: RequestOptions, engine: EngineOptions, remote: RemoteOptions, system: str | None
) -> None:
    """Answer each line of standard input."""
    support = support_of(engine, remote)
    support.check(setup)
    request.form()
    request.tool_schemas()
    if support is ENGINE:
        request.constraint()
        setup = _with_tokenizer(setup)
    asked = replace(request, max_new_tokens=request.max_new_tokens or MAX_NEW_TOKENS)
    with opened_backend(setup, asked, engine, remote, reasoning=_print_reasoning) as backend:
        asked.sampling(backend.sampling)
        ours = backend.engine
        if ours is not None and ours.tokenizer is not None:
            note_room(ours, request.max_new_tokens)
            ours.eos_ids |= _turn_markers(ours.tokenizer)
        converse(backend, asked, system)


def _with_tokenizer(setup: Setup) -> Setup:
    """A setup of an engine for one conversation, with its tokenizer. Raises InputError where it cannot chat."""
    tell_loading()
    tokenizer = tokenizer_of(completed(setup))
    if tokenizer is None:
        raise InputError("there is no tokenizer beside the target, and a chat needs one; name it with --tokenizer")
    if tokenizer.chat_template is None:
        raise InputError("the target's tokenizer has no chat template; use `outrider generate`")
    return replace(setup, max_slots=setup.max_slots or 1, tokenizer=tokenizer)


def converse(backend: Backend, request: RequestOptions, system: str | None) -> None:
    """Let a backend answer each line of standard input."""
    opening = [] if system is None else [{"role": "system", "content": system}]
    conversation = ChatState(backend=backend, opening=opening, request=request)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    while (line := _line(console)) not in (None, "/quit"):
        if line and re.match(r"/\w+( |$)", line):
            try:
                _obey(conversation, line, console)
            except InputError as error:
                console.print(f"error: {error}", style="red", markup=False)
        elif line:
            _say(conversation, line, console)


def answer(backend: Backend, messages: list[dict[str, str]], request: RequestOptions) -> str:
    """Print the answer to a conversation as it comes. An interrupt ends the answer, not the conversation."""
    # A name of its own: what was cancelled before may still be on its way.
    id = uuid.uuid4().hex
    backend.add(messages, request, id=id)
    output: Output | None = None
    try:
        with streamed() as text:
            while output is None:
                for update in backend.step():
                    text.print(succeeded(update).text)
                    output = update.output
    except KeyboardInterrupt:
        output = backend.cancel(id)
    if output is None:
        return ""
    if output.num_steps:
        numbers = f"{len(output.tokens)} tokens, {output.num_steps} steps"
        line = f"[{numbers}, block efficiency {output.block_efficiency:.2f}]"
        Console(stderr=True, highlight=False, markup=False).print(line, style="dim")
    return output.text


def _obey(conversation: ChatState, line: str, console: Console) -> None:
    """Run a command, a line that begins with a slash."""
    name, _, rest = line.partition(" ")
    if name == "/help":
        for command, words in COMMANDS.items():
            console.print(f"{command:<16} {words}", markup=False)
    elif name == "/settings":
        for setting, value in conversation.settings.items():
            if value not in (None, ()):
                console.print(f"{setting} = {value}", markup=False)
    elif name == "/set":
        setting, _, value = rest.strip().partition(" ")
        conversation.set(setting.replace("-", "_"), value.strip())
    elif name == "/reset":
        conversation.messages = list(conversation.opening)
    else:
        raise unknown("command", name, [command.split()[0] for command in COMMANDS])


def _say(conversation: ChatState, line: str, console: Console) -> None:
    """Send a message and print the answer. A message that cannot be sent is dropped; the earlier ones are kept."""
    before = list(conversation.messages)
    conversation.messages.append({"role": "user", "content": line})
    try:
        text = answer(conversation.backend, list(conversation.messages), conversation.request)
    except InputError as error:
        conversation.messages = before
        if before == conversation.opening:
            raise
        console.print(f"error: {error}; /reset begins anew", style="red", markup=False)
    else:
        conversation.messages.append({"role": "assistant", "content": text})


def _value(name: str, text: str, hint: object) -> object:
    """The value of a setting from its text."""
    kind = kind_of(hint)
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        if typing.get_origin(kind) is list:
            return (typing.get_args(kind)[0](text),)
        return kind(text)
    except (KeyError, ValueError) as error:
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}.get(kind, "a whole number")
        raise InputError(f"{name} must be {wanted}, got {text!r}") from error


def _turn_markers(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The special token with which the template begins the user's next turn, if there is one. An answer ends there."""
    talk = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
    try:
        ends, goes_on = (list(tokenizer.apply_chat_template(talk[:n], return_dict=False)) for n in (2, 3))
    except Exception as error:
        raise InputError(f"the target's chat template makes no prompt of a conversation: {error}") from error
    following = goes_on[len(ends) :]
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    same = goes_on[: len(ends)] == ends
    return frozenset(following[:1]) & special if same else frozenset()


def _line(console: Console) -> str | None:
    """One line of input; None at its end. An interrupt drops the line that was begun; a second one is the end."""
    for interrupted in (False, True):
        try:
            return _ask(console)
        except KeyboardInterrupt:
            console.print()
            if not interrupted:
                console.print("an interrupt again, the end of input or /quit leaves", style="dim")
    return None


def _ask(console: Console) -> str | None:
    """One line of input; None at its end."""
    if sys.stdin is None:
        return None
    if sys.stdin.isatty():
        console.print("> ", style="bold", end="")
    try:
        line = input().strip()
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not UTF-8 text: {error.reason} at byte {error.start}") from error
    return line


def _print_reasoning(text: str) -> None:
    """Print what a server tells of its reasoning, which is no part of its answer."""
    if sys.stderr is not None:
        print(text, end="", file=sys.stderr, flush=True)
