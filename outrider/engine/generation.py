"""The options of a request: one value, or keywords of `Engine.add`, `stream` and `generate`."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ParamSpec, TypedDict, TypeVar

from outrider.constraints.grammar import Grammar
from outrider.core.constraint import Constraint
from outrider.core.inputs import InputError, shown, unknown
from outrider.core.types import Sampling
from outrider.engine.prompts import Tool

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
DRAWING = {field.name for field in fields(Sampling)}
"""Options of `Sampling`, which people may give beside it."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What is asked of a request besides its prompt. The engine checks the values when it queues the request.

    Attributes:
        max_new_tokens: Most tokens to emit.
        sampling: How tokens are drawn; by default the engine's settings.
        stop: One or several strings that end the output; the text ends before them.
        stop_token_ids: Tokens that end the output, besides the model's own end tokens.
        min_tokens: Fewest tokens before an end token may come. A stop string counts if it ends behind them.
        logprobs: Which log-probabilities to record: None for none, 0 for those of the output's tokens, k for those of
            the k likeliest tokens at each position as well.
        prompt_logprobs: Which log-probabilities of the prompt to record, as `logprobs` does for the output. With
            `max_new_tokens=0` the prompt is only read.
        include_stop: Let the text end behind the stop string that ends it, and not before.
        priority: Of waiting requests, those with the lowest number get slots first.
        max_draft_tokens: Deepest draft of a step; 0 drafts nothing; by default what the length policy chooses.
        max_draft_context: Longest context, in tokens, behind which a token is drafted; by default any length.
        prediction: Token ids that the output may repeat, such as a text that is to be edited. The drafters `ngram` and
            `suffix` draft them; other drafters do not read them. They do not change the output's law.
        owner: Whose request it is. The drafter `suffix` remembers outputs, and drafts them for the same owner alone.
        ignore_eos: Continue after the model's own end tokens and stop strings.
        constraint: A grammar that the output must follow, or any other constraint on tokens.
        allowed_token_ids: The only tokens that may come; by default all.
        bad_words: One or several words that the output may not hold, as the tokenizer spells them.
        tools: Of chat messages: tools that the assistant may call, as JSON schemas or functions.
        documents: Of chat messages: documents that the assistant may use, with title and text.
        chat_template_kwargs: Of chat messages: other arguments of the chat template, such as `enable_thinking`.

    Example:
        >>> import outrider
        >>> engine = outrider.load()
        >>> short = outrider.Generation(max_new_tokens=4, sampling=outrider.Sampling(temperature=0))
        >>> [out] = engine.generate(["Once upon a time"], options=short)
        >>> [same] = engine.generate(["Once upon a time"], max_new_tokens=4, sampling=short.sampling)
        >>> out.tokens == same.tokens
        True
    """

    max_new_tokens: int = 128
    sampling: Sampling | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop: bool = False
    priority: int = 0
    max_draft_tokens: int | None = None
    max_draft_context: int | None = None
    prediction: Sequence[int] = ()
    owner: str | None = None
    ignore_eos: bool = False
    constraint: Constraint | Grammar | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: str | Sequence[str] = ()
    tools: Sequence[Tool] | None = None
    documents: Sequence[Mapping[str, str]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, options: "Generation | None", keywords: "SharedKeywords") -> "Generation":
        """The options of a call: those of one value, or the defaults, overridden by keywords."""
        if not isinstance(options, Generation | None):
            raise InputError(f"options must be an outrider.Generation, got {shown(options)}")
        return replace(options or cls(), **keywords)


class SharedKeywords(TypedDict, total=False):
    """The fields of `Generation` that are the same for all prompts of a call, for type checkers and editors."""

    max_new_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    min_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None
    include_stop: bool
    priority: int
    max_draft_tokens: int | None
    max_draft_context: int | None
    prediction: Sequence[int]
    owner: str | None
    ignore_eos: bool
    allowed_token_ids: Sequence[int] | None
    bad_words: str | Sequence[str]
    tools: Sequence[Tool] | None
    documents: Sequence[Mapping[str, str]] | None
    chat_template_kwargs: Mapping[str, Any] | None


class Keywords(SharedKeywords, total=False):
    """All fields of `Generation`, for type checkers and editors."""

    sampling: Sampling | None
    constraint: Constraint | Grammar | None


def takes_options(method: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """For a method that takes options as keywords: show them in its signature, which `help` prints, and refuse unknown
    names with an InputError.
    """
    signature = inspect.signature(method)
    named_parameters = [
        each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    options = inspect.signature(Generation).parameters.values()
    parameters = [*named_parameters, *(each for each in options if each.name not in signature.parameters)]
    names = [each.name for each in parameters if each.name != "self"]

    @functools.wraps(method)
    def called(*args: Parameters.args, **named: Parameters.kwargs) -> Result:
        for name in named:
            if name not in names:
                if name in DRAWING:
                    raise InputError(f"{name} belongs to sampling; give sampling=outrider.Sampling({name}=...)")
                raise unknown("option", name, names)
        return method(*args, **named)

    called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return called
