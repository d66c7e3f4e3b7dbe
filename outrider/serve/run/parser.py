"""Reasoning, text and tool calls, told apart in an output as it grows."""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from typing import Any, Literal, Protocol, runtime_checkable

from transformers import PreTrainedTokenizerBase

from outrider.core.inputs import InputError

Template = Mapping[str, Any]
"""A response template of transformers."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of the field of reasoning in response templates."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A piece of an answer.

    Attributes:
        text: More of the reasoning, of the content or of a call's arguments.
        call: Number of the tool call, where it is one.
        id: The call's id, in its first piece.
        name: The function's name, in the first piece of its call.
    """

    kind: Literal["reasoning", "content", "call"]
    text: str = ""
    call: int = 0
    id: str | None = None
    name: str | None = None


@runtime_checkable
class OutputReader(Protocol):
    """Reads one output."""

    @property
    def reasons(self) -> bool:
        """Whether the newest text is reasoning."""
        ...

    @property
    def failures(self) -> int:
        """Number of tool calls that could not be read."""
        ...

    def feed(self, text: str) -> list[Piece]:
        """The pieces that more text completes."""
        ...

    def end(self, *, cut: bool) -> list[Piece]:
        """The last pieces.

        Args:
            cut: Whether the output ended at its longest length.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class PlainReader:
    """All text is content."""

    reasons: bool = False
    failures: int = 0

    def feed(self, text: str) -> list[Piece]:
        """The text."""
        return [Piece(kind="content", text=text)] if text else []

    def end(self, *, cut: bool) -> list[Piece]:
        """Nothing is held back."""
        return []


class TemplateReader:
    """Follows a response template. A tool call comes in one piece, when it is complete; one that cannot be read is
    content, with all text behind it.

    Args:
        prompt: The prompt as text with special tokens: templates may open the reasoning there.
        tools: Tools by whose schemas arguments are typed.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: Template, prompt: str, tools: Sequence[Mapping[str, Any]]
    ) -> None:
        try:
            self._parser = tokenizer.get_response_parser(dict(template), prefix=prompt, tools=list(tools))
        except ValueError:
            # A prompt may hold calls that nobody can read.
            prompt = ""
            self._parser = tokenizer.get_response_parser(dict(template), prefix=prompt, tools=list(tools))
        self._open: str | None = None
        self._calls = 0
        # The parser holds back the end of a prompt with which a mark can begin. It comes with the output's first text.
        self._raw = held_back(tokenizer.get_response_parser(dict(template), prefix=prompt))
        self._prompted = self._shown = len(self._raw)
        self._found = 0
        self._strips = False
        self._behind = False
        self.failures = 0
        for event in self._parser.initial_events:
            self._note(event)
        self._behind = self._behind and not self._prompted

    @property
    def reasons(self) -> bool:
        """Whether the newest text is reasoning."""
        return self._open in REASONING

    def feed(self, text: str) -> list[Piece]:
        """The pieces that more text completes."""
        if self.failures:
            return [Piece(kind="content", text=text)] if text else []
        self._raw += text
        try:
            return self._pieces(self._parser.feed(text))
        except ValueError:
            return self._failed()

    def end(self, *, cut: bool) -> list[Piece]:
        """The last pieces."""
        if self.failures:
            return []
        try:
            return self._pieces(self._parser.finalize()[1])
        except ValueError:
            return self._failed()

    def _pieces(self, events: Sequence[Mapping[str, Any]]) -> list[Piece]:
        pieces: list[Piece] = []
        for event in events:
            if event["type"] == "region_chunk":
                pieces += self._chunk(event)
            elif event["type"] == "region_close" and event["field"] == "tool_calls":
                pieces += self._called(event["value"])
            self._note(event)
        return pieces

    def _chunk(self, event: Mapping[str, Any]) -> list[Piece]:
        text = event["text"]
        if not event["dirty"]:
            at = self._raw.index(text, self._found)
            self._found = at + len(text)
            self._shown = max(self._shown, self._found)
            text = text[max(0, self._prompted - at) :]
        if event["dirty"] or event["field"] not in (*REASONING, "content"):
            return []
        if self._strips:
            text = text.lstrip("\n")
        self._strips = self._strips and not text
        kind: Literal["reasoning", "content"] = "content" if event["field"] == "content" else "reasoning"
        return [Piece(kind=kind, text=text)] if text else []

    def _called(self, value: Any) -> list[Piece]:
        pieces = []
        for call in value if isinstance(value, list) else [value]:
            function = call.get("function", call) if isinstance(call, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise ValueError("a tool call has no name")
            arguments = function.get("arguments", function.get("parameters", {}))
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            pieces.append(Piece(kind="call", text=text, call=self._calls, id=_call_id(), name=function["name"]))
            self._calls += 1
        self._shown = self._found = len(self._raw)
        return pieces

    def _note(self, event: Mapping[str, Any]) -> None:
        if event["type"] == "region_open":
            self._open = event["field"]
            # Templates set the regions apart by line breaks. Those at the beginning of an answer are the answer's.
            self._strips = self._open != "content" or self._behind
        elif event["type"] == "region_close":
            self._open, self._behind = None, True

    def _failed(self) -> list[Piece]:
        self.failures += 1
        self._open = None
        rest = self._raw[self._shown :]
        return [Piece(kind="content", text=rest)] if rest else []


@dataclass(kw_only=True)
class ReaderAround:
    """Reads more in the content that another reader tells apart. A class of it says what a piece becomes.

    Attributes:
        inner: Tells reasoning, content and calls with marks apart.
    """

    inner: OutputReader

    @property
    def reasons(self) -> bool:
        """Whether the newest text is reasoning."""
        return self.inner.reasons

    @property
    def failures(self) -> int:
        """Number of tool calls that could not be read."""
        return self.inner.failures

    def feed(self, text: str) -> list[Piece]:
        """The pieces that more text completes."""
        return [each for piece in self.inner.feed(text) for each in self._turned(piece)]

    def _turned(self, piece: Piece) -> list[Piece]:
        raise NotImplementedError


@dataclass(kw_only=True)
class ForcedReader(ReaderAround):
    """Reads an output that a grammar forces to be tool calls, behind what another reader takes for reasoning.

    Attributes:
        name: The function, if the output is its arguments alone; None where the output is an object that begins with
            `name` and ends with `parameters`, or a list of such objects.
    """

    name: str | None
    _text: str = field(default="", init=False)
    _calls: int = field(default=0, init=False)
    _arguments: "Value | None" = field(default=None, init=False)

    HEAD = re.compile(r'[\s\[,]*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"parameters"\s*:\s*(?=\S)')

    def end(self, *, cut: bool) -> list[Piece]:
        """The last pieces. A call that was cut off within its name is left out, behind others."""
        pieces = [each for piece in self.inner.end(cut=cut) for each in self._turned(piece)]
        if not self._calls and self._text:
            pieces.append(Piece(kind="content", text=self._text))
        self._text = ""
        return pieces

    def _turned(self, piece: Piece) -> list[Piece]:
        """Content becomes pieces of a call."""
        if piece.kind != "content":
            return [piece]
        if self.name is not None:
            pieces = [] if self._calls else [Piece(kind="call", id=_call_id(), name=self.name)]
            self._calls = 1
            return [*pieces, Piece(kind="call", text=piece.text)]
        self._text += piece.text
        pieces = []
        while self._text:
            if self._arguments is None:
                head = self.HEAD.match(self._text)
                if head is None:
                    break
                self._text, self._arguments, self._calls = self._text[head.end() :], Value(), self._calls + 1
                pieces.append(Piece(kind="call", call=self._calls - 1, id=_call_id(), name=json.loads(head[1])))
            size = self._arguments.size(self._text)
            text = self._text[:size] if self._arguments.inside else self._text[:size].rstrip()
            if text:
                pieces.append(Piece(kind="call", call=self._calls - 1, text=text))
            if size < len(self._text):
                # The brace that closes the object around the arguments.
                self._arguments = None
                size += 1
            self._text = self._text[size:]
        return pieces


@dataclass(kw_only=True)
class BareCallReader(ReaderAround):
    """Reads an output that may be a tool call without marks: all of its content is one JSON object with the name of an
    offered tool and its arguments. Content is held back while it can still become such an object; other content comes
    unchanged.

    Attributes:
        names: The tools that are offered.
    """

    names: frozenset[str]
    _held: str = field(default="", init=False)
    _over: bool = field(default=False, init=False)

    KEYS = ('"name"', '"arguments"', '"parameters"')
    NAME = re.compile(r'"name"\s*:\s*("(?:[^"\\]|\\.)*")')

    def end(self, *, cut: bool) -> list[Piece]:
        """The last pieces."""
        pieces = [each for piece in self.inner.end(cut=cut) for each in self._turned(piece)]
        called = None if self._over else self._called()
        return [*pieces, *self._released()] if called is None else [*pieces, called]

    def _turned(self, piece: Piece) -> list[Piece]:
        if self._over or piece.kind == "reasoning":
            return [piece]
        if piece.kind == "call":
            return [*self._released(), piece]
        self._held += piece.text
        return [] if self._possible() else self._released()

    def _released(self) -> list[Piece]:
        """What was held back, as content; nothing is held back any more."""
        held, self._held, self._over = self._held, "", True
        return [Piece(kind="content", text=held)] if held else []

    def _possible(self) -> bool:
        """Whether the content can still become a call."""
        text = self._held.strip()
        inside = text[1:].lstrip()
        if text[:1] not in ("", "{") or not any(key.startswith(inside[: len(key)]) for key in self.KEYS):
            return False
        name = self.NAME.match(inside)
        try:
            if name is not None and json.loads(name[1]) not in self.names:
                return False
            json.loads(text)
        except json.JSONDecodeError as error:
            return unfinished(text, error)
        return self._called() is not None

    def _called(self) -> Piece | None:
        """The call that the content is; None if it is none."""
        try:
            value = json.loads(self._held)
        except ValueError:
            return None
        rest = dict(value) if isinstance(value, Mapping) else {}
        name, arguments = rest.pop("name", None), rest.pop("arguments", rest.pop("parameters", None))
        if rest or not isinstance(name, str) or name not in self.names or not isinstance(arguments, Mapping):
            return None
        return Piece(kind="call", text=json.dumps(arguments, ensure_ascii=False), id=_call_id(), name=name)


def unfinished(text: str, error: json.JSONDecodeError) -> bool:
    """Whether a text is no JSON only because more of it is to come.

    Example:
        >>> def more(text):
        ...     try:
        ...         json.loads(text)
        ...     except json.JSONDecodeError as error:
        ...         return unfinished(text, error)
        >>> more('{"a": [tr'), more('{"a": "b'), more('{"a"'), more('{"a": oops'), more('{} x')
        (True, True, True, False, False)
    """
    rest = text[error.pos :]
    begun = not rest or any(word.startswith(rest) for word in ("true", "false", "null", "-"))
    return begun or error.msg.startswith("Unterminated") or (error.msg.startswith("Invalid \\") and len(rest) < 6)


@dataclass(kw_only=True)
class Value:
    """A JSON value that is the last one of an object, as its text comes; changes in place."""

    _depth: int = 0
    _quoted: bool = False
    _escaped: bool = False

    @property
    def inside(self) -> bool:
        """Whether more must come. Behind the last character of a value only whitespace does."""
        return self._depth > 0 or self._quoted

    def size(self, text: str) -> int:
        """How many more characters belong to the value: all of them, or those before the brace that ends the object.

        Example:
            >>> value = Value()
            >>> value.size('{"a": "}'), value.size('"}}, {')
            (8, 2)
        """
        for i, letter in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = letter == "\\", letter != '"'
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                if not self._depth:
                    return i
                self._depth -= 1
        return len(text)


@dataclass(frozen=True, kw_only=True)
class OutputParser:
    """How the outputs of a model are read.

    Attributes:
        template: The response template; None: all text is content.
        name: What messages call it.
    """

    tokenizer: PreTrainedTokenizerBase
    template: Template | None
    name: str

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, asked: Template | str | None) -> "OutputParser":
        """The reading for a tokenizer.

        Args:
            asked: A template, None for plain text, or `auto`: the tokenizer's own template, or that of a kind of model
                whose marks stand in the chat template.

        Raises:
            InputError: The template is none.
        """
        if asked == "auto":
            known = getattr(tokenizer, "response_template", None)
            name, template = ("the tokenizer's template", known) if known else _known(tokenizer)
        else:
            name, template = ("plain text", None) if asked is None else ("the given template", asked)
        if template is not None:
            try:
                tokenizer.get_response_parser(dict(template), prefix="")
            except (ValueError, TypeError) as error:
                raise InputError(f"the response template cannot be used: {error}") from error
        return cls(tokenizer=tokenizer, template=template, name=name)

    @property
    def calls(self) -> bool:
        """Whether tool calls can be told apart in free text."""
        return self.template is not None and "tool_calls" in self.template["fields"]

    @property
    def thinking(self) -> tuple[str, str] | None:
        """The texts that open and close the reasoning; None if there is none or patterns do."""
        fields = {} if self.template is None else self.template["fields"]
        for name in REASONING:
            ends = [fields.get(name, {}).get(side) for side in ("open", "close")]
            if all(isinstance(each, str) for each in ends):
                return ends[0], ends[1]
        return None

    def reader(
        self, prompt: Sequence[int], tools: Sequence[Mapping[str, Any]], forced: str | Literal[True] | None
    ) -> OutputReader:
        """A reader of one output.

        Args:
            tools: Tools that the model may call.
            forced: The function that a grammar forces; True for any of them.
        """
        inner: OutputReader = PlainReader()
        if self.template is not None:
            text = str(self.tokenizer.decode(list(prompt), skip_special_tokens=False))
            inner = TemplateReader(self.tokenizer, self.template, text, tools)
        if forced is None and tools and self.call_marks is not None:
            # Models that were trained on calls between marks leave the marks out now and then.
            return BareCallReader(inner=inner, names=frozenset(tool["function"]["name"] for tool in tools))
        if forced is None:
            return inner
        return ForcedReader(inner=inner, name=None if forced is True else forced)

    @property
    def call_marks(self) -> tuple[str, str] | None:
        """The texts around a call that is a JSON object with `name` and `arguments`; None if calls look otherwise."""
        calls = {} if self.template is None else self.template["fields"].get("tool_calls", {})
        if calls.get("content") != "json" or calls.get("transform") != {"type": "function", "function": "{content}"}:
            return None
        opens, closes = calls.get("open") or _literal(calls.get("open_pattern")), calls.get("close")
        return (opens, closes) if isinstance(opens, str) and opens and isinstance(closes, str) else None

    @cached_property
    def hidden(self) -> frozenset[int]:
        """Special tokens that the template does not look for."""
        text = json.dumps(self.template, ensure_ascii=False)
        special = {id: each.content for id, each in self.tokenizer.added_tokens_decoder.items() if each.special}
        written = {id: json.dumps(name, ensure_ascii=False)[1:-1] for id, name in special.items()}
        escaped = {id: json.dumps(re.escape(name), ensure_ascii=False)[1:-1] for id, name in special.items()}
        return frozenset(id for id in special if written[id] not in text and escaped[id] not in text)


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def held_back(parser: Any) -> str:
    """The end of its prompt that a response parser has not told yet; the parser is used up."""
    try:
        events = parser.finalize()[1]
    except ValueError:
        return ""
    return "".join(event["text"] for event in events if event["type"] == "region_chunk")


def _literal(pattern: str | None) -> str | None:
    r"""The text that a pattern matches behind whitespace; None if it matches several.

    Example:
        >>> _literal(r"\s*<tool_call>"), _literal(r"<(a|b)>")
        ('<tool_call>', None)
    """
    text = (pattern or "").removeprefix(r"\s*")
    return text if text and not set(text) & set(r"\.^$*+?{}[]|()") else None


def _known(tokenizer: PreTrainedTokenizerBase) -> tuple[str, Template | None]:
    """The template of the first kind of model whose marks all stand in the chat template."""
    templates = tokenizer.chat_template
    text = templates if isinstance(templates, str) else "\n".join((templates or {}).values())
    table = json.loads(resources.files("outrider.serve.run").joinpath("response_templates.json").read_text("utf-8"))
    for row in table:
        if all(mark in text for mark in row["marks"]):
            return row["name"], row["template"]
    return "plain text", None
