"""One output as it grows: its tokens, its text in pieces, its log-probabilities, its end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from outrider.engine.output import Output, Times
from outrider.engine.text import Ending
from outrider.serve.api.errors import ApiError
from outrider.serve.api.gateway import Gateway
from outrider.serve.api.usage import OutputTally, TokenUsage, metrics, usage
from outrider.serve.run.job import OutputTask, StepOutput
from outrider.serve.run.parser import OutputReader, Piece, PlainReader


@dataclass(frozen=True, kw_only=True)
class OutputPart:
    """What an event brings.

    Attributes:
        pieces: New text, none where it is held back.
        own: Log-probability of each token, if asked for.
        top: Of the likeliest tokens at each place.
        ended: Whether the output ends here.
    """

    pieces: Sequence[Piece]
    tokens: Sequence[int]
    own: Sequence[float]
    top: Sequence[Mapping[int, float]]
    ended: bool = False

    def joined(self, other: "OutputPart") -> "OutputPart":
        """This part and the next one."""
        return OutputPart(
            pieces=joined([*self.pieces, *other.pieces]),
            tokens=[*self.tokens, *other.tokens],
            own=[*self.own, *other.own],
            top=[*self.top, *other.top],
            ended=other.ended,
        )


@dataclass(kw_only=True)
class OutputStream:
    """One output of a request; changes in place.

    Attributes:
        index: Its number in the answer.
        prompt: The number of its prompt.
        job: What was asked.
        reader: Tells reasoning, content and tool calls apart.
        raw: The text with special tokens, where the reader or the client wants it.
        tokens: All tokens so far.
        finish_reason: Why it ended; None before.
    """

    index: int
    prompt: int
    job: OutputTask
    reader: OutputReader = field(default_factory=PlainReader)
    raw: Ending | None = None
    tokens: list[int] = field(default_factory=list)
    tally: OutputTally = field(default_factory=OutputTally)
    reasoning_tokens: int = 0
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None
    output: Output | None = None
    times: Times | None = None

    @property
    def cached(self) -> int:
        """Prompt tokens that needed no prefill."""
        return 0 if self.output is None else self.output.reused_tokens

    def take(self, event: StepOutput) -> OutputPart:
        """What an event brings. Raises ApiError if the output was ended from outside."""
        update, self.times = event.update, event.times
        self.tokens += update.tokens
        own: Sequence[float] = ()
        top: Sequence[Mapping[int, float]] = ()
        if update.step is not None:
            self.tally.add(update.step)
            own = (update.step.logprobs or ())[: len(update.tokens)]
            top = (update.step.top_logprobs or ({},) * len(own))[: len(update.tokens)]
        if update.output is not None:
            self._end(update.output, event.stop_reason)
        pieces = self._read(update.tokens, update.text)
        return OutputPart(
            pieces=joined(pieces), tokens=update.tokens, own=own, top=top, ended=update.output is not None
        )

    def _end(self, output: Output, stop_reason: str | int | None) -> None:
        if output.finish_reason not in ("stop", "length"):
            raise ApiError(503, "the server ended this request", code="draining")
        self.output, self.finish_reason = output, "length" if output.finish_reason == "length" else "stop"
        self.stop_reason = stop_reason

    def _read(self, tokens: Sequence[int], text: str) -> list[Piece]:
        """The pieces of new text."""
        found: list[Piece] = []
        if self.raw is None:
            found += self.reader.feed(text)
        else:
            for token in self._visible(tokens):
                self.raw.keep((token,))
                found += self.reader.feed(self.raw.take())
                self.reasoning_tokens += self.reader.reasons
        if self.output is not None:
            if self.raw is not None:
                found += self.reader.feed(self.raw.finish())
            found += self.reader.end(cut=self.finish_reason == "length")
        return found

    def _visible(self, tokens: Sequence[int]) -> Sequence[int]:
        """The tokens without the one that ended the output, which is no text."""
        ended = self.output is not None and self.finish_reason == "stop" and not isinstance(self.stop_reason, str)
        return tokens[:-1] if ended and not self.job.include_stop else tokens


class Interval:
    """Joins parts until they hold some tokens. The first and the last one do not wait.

    Args:
        tokens: So many.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._held: OutputPart | None = None
        self._first = True

    def add(self, part: OutputPart) -> OutputPart | None:
        """What is to be sent now."""
        part = part if self._held is None else self._held.joined(part)
        self._held = part
        if not (self._first or part.ended or len(part.tokens) >= self._tokens):
            return None
        self._held, self._first = None, False
        return part


def usage_of(choices: Sequence[OutputStream]) -> TokenUsage:
    """The numbers of tokens of a whole request. A prompt counts once, however many outputs it has."""
    prompts = {choice.prompt: choice for choice in reversed(choices)}.values()
    outputs = [choice.output for choice in choices if choice.output is not None]
    return usage(
        sum(len(choice.job.prompt) for choice in prompts),
        sum(len(choice.tokens) for choice in choices),
        cached=sum(choice.cached for choice in prompts),
        reasoning=sum(choice.reasoning_tokens for choice in choices),
        accepted=sum(each.accepted_prediction_tokens for each in outputs),
        rejected=sum(each.rejected_prediction_tokens for each in outputs),
    )


def usage_so_far(choice: OutputStream) -> TokenUsage:
    """The numbers of tokens of one output."""
    return usage(len(choice.job.prompt), len(choice.tokens), cached=choice.cached, reasoning=choice.reasoning_tokens)


def metrics_of(gateway: Gateway, choices: Sequence[OutputStream]) -> dict[str, Any] | None:
    """The speed of a request; None if it has several outputs or nobody wants to know."""
    detail, one = gateway.settings.request_metrics, choices[0]
    if detail == "none" or len(choices) > 1 or one.output is None or one.times is None:
        return None
    return metrics(one.tally, one.times, one.output, gateway.service.engine.parts, one.job.speculation, detail)


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces, with neighbours of one kind as one piece.

    Example:
        >>> [piece.text for piece in joined([Piece(kind="content", text="a"), Piece(kind="content", text="b")])]
        ['ab']
    """
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if last is not None and last.kind == piece.kind and piece.id is None and last.call == piece.call:
            found[-1] = replace(last, text=last.text + piece.text)
        else:
            found.append(piece)
    return found
