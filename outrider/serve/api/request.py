"""A body becomes one typed request, whatever its format: what the engine is asked for, and what the answer says."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request

from outrider.core.inputs import InputError, shown
from outrider.core.types import Sampling
from outrider.engine.generation import Generation
from outrider.engine.output import PromptLogprobs
from outrider.serve.api.bodies import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    ResponseFormat,
    SamplingBody,
    SpeculationBody,
    checked,
)
from outrider.serve.api.errors import of_input
from outrider.serve.api.gateway import Gateway
from outrider.serve.api.grammars import ToolUse, grammar_of
from outrider.serve.api.prompts import text_of
from outrider.serve.errors import ServeError, refuse, refuse_key
from outrider.serve.limits import Limits
from outrider.serve.run.outputs import RequestSpeculation
from outrider.serve.run.templates import ChatPrompt

DRAWING = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
"""Fields that are those of `Sampling`."""
UNSUPPORTED = {
    "guided_json": "give structured_outputs.json",
    "guided_regex": "give structured_outputs.regex",
    "guided_choice": "give structured_outputs.choice",
    "guided_grammar": "give structured_outputs.grammar",
    "prompt_embeds": "give the prompt as text or token ids",
    "logits_processors": "give logit_bias, allowed_token_ids or bad_words",
    "functions": "give tools",
    "function_call": "give tool_choice",
    "audio": "only text is generated",
    "web_search_options": "only functions can be tools",
    "thinking_token_budget": "give max_tokens",
    "mcp_servers": "only functions can be tools",
}
"""Fields that change the output and that nothing here follows, with what to do instead."""
NEUTRAL: dict[str, Any] = {"use_beam_search": False, "length_penalty": 1, "typical_p": 1, "no_repeat_ngram_size": 0}
NEUTRAL |= {
    "mirostat": 0,
    "top_a": 0,
    "xtc_probability": 0,
    "dry_multiplier": 0,
    "tfs_z": 1,
    "modalities": ["text"],
    "echo": False,
}
"""Fields that change the output unless they have these values."""
OFF = {"disable_spec_decode": True, "disable_speculative_decoding": True, "speculative": False}
"""Other engines' names for drafting nothing, with the value that says so."""
NESTED = ("vllm_xargs", "extra_body")
"""Fields in which clients nest the fields of other servers."""
DEPTH = "speculative.n_max"
"""llama.cpp's name for the deepest draft."""
PRIORITIES = ("x-outrider-priority", "x-vllm-priority")


@dataclass(frozen=True, kw_only=True)
class RequestPrompt:
    """A prompt of a request.

    Attributes:
        text: The prompt as the client wrote it; None where it wrote token ids, or where it was cut.
        scores: Its log-probabilities, if anything asks for them.
    """

    tokens: tuple[int, ...]
    text: str | None = None
    scores: PromptLogprobs | None = None


@dataclass(frozen=True, kw_only=True)
class AnswerFormat:
    """What an answer says besides its text.

    Attributes:
        stream: Whether it comes as a stream.
        usage: Whether a stream ends with the numbers of tokens.
        counts: Whether each part of a stream has them too.
        interval: Fewest tokens of a part of a stream, but for the first and the last one.
        logprobs: How many of the likeliest tokens come with the log-probabilities; None: no log-probabilities.
        prompt_logprobs: The same of the prompt.
        as_ids: Whether log-probabilities name tokens by their ids.
        token_ids: Whether token ids come with the text.
        reasoning: Whether the model's reasoning is shown.
        echo: Whether the text begins with the prompt.
    """

    stream: bool = False
    usage: bool = False
    counts: bool = False
    interval: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    as_ids: bool = False
    token_ids: bool = False
    reasoning: bool = True
    echo: bool = False


@dataclass(frozen=True, kw_only=True)
class ClientRequest:
    """What a client asks for.

    Attributes:
        name: Its own name of the request, where its body has one.
        options: What is asked of each output, but for its longest length.
        most_tokens: Most tokens of an output; None: as many as fit.
        num_outputs: Outputs of each prompt.
        chat: Whether reasoning and tool calls are told apart in the outputs.
        raw: Whether outputs show special tokens.
        kept: The body as the log of answers keeps it; None: the answer is not kept.
        came: When it came, in seconds of `time.monotonic`.
    """

    prompts: Sequence[RequestPrompt]
    options: Generation
    most_tokens: int | None
    speculation: RequestSpeculation
    format: AnswerFormat
    tools: ToolUse = field(default_factory=ToolUse)
    num_outputs: int = 1
    chat: bool = False
    raw: bool = False
    name: str | None = None
    kept: Mapping[str, Any] | None = None
    came: float = field(default_factory=time.monotonic)


def admit(gateway: Gateway, http: Request, body: SamplingBody) -> None:
    """Take what headers say into a body. Raises ServeError for a model, priority or field that cannot be followed."""
    extra = body.model_extra or {}
    gateway.check_model(body.model)
    for name in PRIORITIES:
        if (header := http.headers.get(name)) is not None:
            if not header.strip().lstrip("-").isdecimal() or len(header) > 9:
                refuse("priority", f"{name} must be a whole number, got {shown(header)}")
            body.priority = int(header)
    gateway.note_unknown(extra)
    if extra.get("n") not in (None, 1):
        refuse_key("n", "one output is made")
    for name, advice in UNSUPPORTED.items():
        if extra.get(name) is not None:
            refuse_key(name, advice)
    for name, neutral in NEUTRAL.items():
        if extra.get(name) is not None and extra[name] != neutral:
            refuse_key(name, "leave it out")
    if body.priority != 0 and not gateway.settings.priorities:
        refuse("priority", "this server serves in order of arrival; leave priority out, or start it with --priority")


async def request_of(
    gateway: Gateway,
    body: SamplingBody,
    prompts: Sequence[RequestPrompt] | ChatPrompt,
    *,
    most_tokens: int | None,
    format: AnswerFormat,
    stops: Sequence[str] | None = None,
    response_format: ResponseFormat | None = None,
    tools: ToolUse | None = None,
) -> ClientRequest:
    """The typed request of a body.

    Args:
        prompts: The prompts, not cut yet, or the conversation that is one.
        most_tokens: Most tokens of an output; None: as many as fit.
        stops: Stop strings under the format's own name; None: those of `stop`.
        response_format: The form of the output.
        tools: Tools that the model may or must call; None: the request is no chat.

    Raises:
        ServeError, InputError: A field cannot be followed.
    """
    service, use, many = gateway.service, tools or ToolUse(), body if isinstance(body, GenerationBody) else None
    if use.free and not gateway.parser.calls:
        refuse(
            "tools",
            f"this model's tool calls cannot be told apart in its text ({gateway.parser.name}); give tool_choice "
            "'required' or a function, or start the server with --response-template FILE",
        )
    if many is not None and many.n > service.limits.max_outputs:
        refuse("n", f"n must be 1 .. {service.limits.max_outputs}, got {shown(many.n)}")
    if most_tokens is not None and body.min_tokens > most_tokens:
        refuse("min_tokens", f"min_tokens must be 0 .. max_tokens={most_tokens}, got {shown(body.min_tokens)}")
    param, side = "prompt", body.truncation_side
    if isinstance(prompts, ChatPrompt):
        param, prompts = "messages", [RequestPrompt(tokens=tuple(await service.encode_chat(prompts)))]
    prompts = [_fitted(gateway, each, body.truncate_prompt_tokens, side=side, param=param) for each in prompts]
    options = _options(body, service.engine.sampling, service.limits, stops=stops, logprobs=format.logprobs)
    speculation = _speculation(body.speculation, body.model_extra or {})
    asked, marks = body.structured_outputs, gateway.parser.call_marks
    grammar, param = grammar_of(use, response_format, asked, service.limits, marks=marks)
    if grammar is not None:
        try:
            options = replace(options, constraint=await service.bind(grammar, options))
        except InputError as error:
            refused = of_input(error)
            raise ServeError(400, refused.message, param=refused.param or param) from None
    if body.prediction is not None:
        text = text_of(body.prediction.content, "prediction.content")
        options = replace(options, prediction=tuple(await service.encode(text, special=False)))
    keeps = gateway.answers is not None and isinstance(body, ChatBody | CompletionBody)
    keeps = keeps and (body.model_extra or {}).get("store") is not False
    return ClientRequest(
        prompts=prompts,
        options=options,
        most_tokens=most_tokens,
        speculation=speculation,
        format=format,
        tools=use,
        num_outputs=1 if many is None else many.n,
        chat=tools is not None,
        raw=not body.skip_special_tokens,
        name=None if many is None else many.request_id,
        kept=body.model_dump(mode="json", exclude_unset=True, by_alias=True) if keeps else None,
    )


def answer_format(body: GenerationBody, limits: Limits, *, logprobs: int | None, param: str) -> AnswerFormat:
    """What an answer in OpenAI's formats says. Raises ServeError for a field that cannot be followed.

    Args:
        logprobs: How many of the likeliest tokens come with log-probabilities; None for no log-probabilities.
        param: The field that says so.
    """
    options = body.stream_options
    if options is not None and not body.stream:
        refuse("stream_options", "stream_options can be given with stream: true alone")
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        refuse("stream_options", "continuous_usage_stats needs include_usage: true")
    for name, count in (("prompt_logprobs", body.prompt_logprobs), (param, logprobs)):
        if count is not None and not 0 <= count <= limits.max_logprobs:
            refuse(name, f"{name} must be 0 .. {limits.max_logprobs}, got {shown(count)}")
    if body.prompt_logprobs is not None and body.stream:
        refuse("prompt_logprobs", "prompt_logprobs cannot be streamed; leave stream out")
    return AnswerFormat(
        stream=body.stream,
        usage=options is not None and options.include_usage,
        counts=options is not None and options.continuous_usage_stats,
        interval=body.stream_interval if body.stream else 1,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        as_ids=body.return_tokens_as_token_ids,
        token_ids=body.return_token_ids,
    )


def _fitted(gateway: Gateway, prompt: RequestPrompt, cut: int | None, *, side: str, param: str) -> RequestPrompt:
    """The prompt, cut as the request wants it. Raises ServeError if there is no room for an output."""
    longest, tokens = gateway.service.max_context, prompt.tokens
    if cut is not None:
        most = longest - 1 if cut == -1 else cut
        if not 1 <= most < longest:
            refuse("truncate_prompt_tokens", f"truncate_prompt_tokens must be -1 or 1 .. {longest - 1}, got {cut}")
        tokens = tokens[-most:] if side == "left" else tokens[:most]
    if not tokens:
        refuse(param, "the prompt is empty; give at least one token")
    if len(tokens) >= longest:
        refuse(
            param,
            f"the prompt has {len(tokens)} tokens, and the context of this server {longest}, of which at least one is "
            "the output's; shorten the prompt, or give truncate_prompt_tokens",
            "context_length_exceeded",
        )
    width = gateway.service.engine.parts.target.vocab_size
    if wrong := [token for token in tokens if not 0 <= token < width]:
        refuse(param, f"token id {shown(wrong[0])} is not in 0 .. {width - 1}")
    return prompt if len(tokens) == len(prompt.tokens) else RequestPrompt(tokens=tokens)


def _options(
    body: SamplingBody, usual: Sampling, limits: Limits, *, stops: Sequence[str] | None, logprobs: int | None
) -> Generation:
    """What is asked of each output: the request's fields, and the model's own settings where it has none."""
    fields: dict[str, Any] = {name: value for name in DRAWING if (value := getattr(body, name)) is not None}
    if body.top_k is not None:
        fields["top_k"] = 0 if body.top_k == -1 else body.top_k
    if body.seed is not None:
        fields["seed"] = body.seed % 2**64
    if len(body.logit_bias) > limits.max_logit_bias:
        refuse("logit_bias", f"logit_bias may name {limits.max_logit_bias} tokens, got {len(body.logit_bias)}")
    if wrong := [token for token in body.logit_bias if not re.fullmatch(r"\s*[+-]?\d+\s*", token)]:
        refuse("logit_bias", f"logit_bias maps token ids to numbers, got the token {shown(wrong[0])}")
    if body.logit_bias:
        fields["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
    if stops is None:
        stops = [body.stop] if isinstance(body.stop, str) else body.stop
    if len(stops) > limits.max_stops:
        refuse("stop", f"stop may hold {limits.max_stops} strings, got {len(stops)}")
    if any(not 0 < len(each) <= limits.max_stop_length for each in stops):
        refuse("stop", f"a stop string has 1 .. {limits.max_stop_length} characters")
    return Generation(
        sampling=replace(usual, **fields),
        min_tokens=body.min_tokens,
        stop=tuple(stops),
        stop_token_ids=tuple(body.stop_token_ids),
        include_stop=body.include_stop_str_in_output,
        logprobs=logprobs,
        ignore_eos=body.ignore_eos,
        allowed_token_ids=body.allowed_token_ids,
        bad_words=tuple(body.bad_words),
        priority=body.priority,
    )


def _speculation(asked: SpeculationBody | bool | None, extra: Mapping[str, Any]) -> RequestSpeculation:
    """The speculation of a request, wherever the client put it.

    Args:
        extra: Fields of its body that have no names of ours.
    """
    beside = [extra[name].get("speculation") for name in NESTED if isinstance(extra.get(name), Mapping)]
    value = next((each for each in (asked, *beside) if each is not None), None)
    fields = value if isinstance(value, SpeculationBody) else _speculation_body(value)
    for name, off in OFF.items():
        if (value := extra.get(name)) is not None:
            if not isinstance(value, bool):
                refuse(name, f"{name} must be true or false")
            fields = fields.model_copy(update={"enabled": value != off})
    if (depth := extra.get(DEPTH)) is not None:
        fields = fields.model_copy(update={"max_tokens": _speculation_body({"max_tokens": depth}).max_tokens})
    return RequestSpeculation(**fields.model_dump(exclude={"policy"}))


def _speculation_body(value: Any) -> SpeculationBody:
    if value is None or isinstance(value, bool):
        return SpeculationBody(enabled=value)
    return checked(SpeculationBody, value)
