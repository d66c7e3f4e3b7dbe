"""What a request asks of the engine: its fields as `Sampling` and `Generation`."""

from dataclasses import replace
from typing import Any

from outrider.core.inputs import InputError, shown
from outrider.core.types import Sampling
from outrider.engine.generation import Generation
from outrider.serve.api.bodies import Body, ChatBody, CompletionBody, GenerationBody
from outrider.serve.api.errors import of_input, refuse, refuse_key
from outrider.serve.api.gateway import Gateway

DRAWING = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
"""Fields that are those of `Sampling`."""
REFUSED = {
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


OF_ROUTES = frozenset({"model", "max_tokens", "stream", "stream_options", "stream_interval", "prompt_logprobs", "user"})
OF_ROUTES |= {"n", "return_token_ids", "return_tokens_as_token_ids", "request_id"}
"""Fields of `GenerationBody` for which routes in other formats have their own, or none."""


def passed_on(request: Body) -> dict[str, Any]:
    """The fields of a request in another format that chat completions read too, and those that they refuse. Raises
    ApiError if it asks for several outputs.
    """
    if request.given("n") not in (None, 1):
        refuse_key("n", "one output is made")
    names = [*(name for name in GenerationBody.model_fields if name not in OF_ROUTES), *REFUSED, *NEUTRAL]
    return {name: value for name in names if (value := request.given(name)) is not None}


def check_keys(body: GenerationBody) -> None:
    """Raise ApiError for fields that would change the output and are not supported."""
    extra = body.model_extra or {}
    for name, advice in REFUSED.items():
        if extra.get(name) is not None:
            refuse_key(name, advice)
    for name, neutral in NEUTRAL.items():
        if extra.get(name) is not None and extra[name] != neutral:
            refuse_key(name, "leave it out")


def check_limits(body: GenerationBody, gateway: Gateway) -> None:
    """Raise ApiError for fields beyond the limits of the server."""
    limits = gateway.service.limits
    if body.n > limits.max_outputs:
        refuse("n", f"n must be 1 .. {limits.max_outputs}, got {shown(body.n)}")
    if len(body.stops) > limits.max_stops:
        refuse("stop", f"stop may hold {limits.max_stops} strings, got {len(body.stops)}")
    if any(not 0 < len(each) <= limits.max_stop_length for each in body.stops):
        refuse("stop", f"a stop string has 1 .. {limits.max_stop_length} characters")
    if len(body.logit_bias) > limits.max_logit_bias:
        refuse("logit_bias", f"logit_bias may name {limits.max_logit_bias} tokens, got {len(body.logit_bias)}")
    if body.priority != 0 and not gateway.settings.priorities:
        refuse("priority", "this server serves in order of arrival; leave priority out, or start it with --priority")
    if body.stream_options is not None and not body.stream:
        refuse("stream_options", "stream_options can be given with stream: true alone")
    options = body.stream_options
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        refuse("stream_options", "continuous_usage_stats needs include_usage: true")
    asked = body.prompt_logprobs
    if asked is not None and not 0 <= asked <= limits.max_logprobs:
        refuse("prompt_logprobs", f"prompt_logprobs must be 0 .. {limits.max_logprobs}, got {shown(asked)}")
    if asked is not None and body.stream:
        refuse("prompt_logprobs", "prompt_logprobs cannot be streamed; leave stream out")


def sampling_of(body: GenerationBody, usual: Sampling) -> Sampling:
    """How outputs are drawn: the request's fields, and the model's own settings where it has none."""
    given: dict[str, Any] = {name: value for name in DRAWING if (value := getattr(body, name)) is not None}
    if body.top_k is not None:
        given["top_k"] = 0 if body.top_k == -1 else body.top_k
    if body.seed is not None:
        given["seed"] = body.seed % 2**64
    if body.logit_bias:
        given["logit_bias"] = _biases(body)
    try:
        return replace(usual, **given)
    except InputError as error:
        raise of_input(error) from None


def generation_of(body: GenerationBody, gateway: Gateway, *, room: int) -> Generation:
    """What is asked of one output, besides how it is drawn and what form it has.

    Args:
        room: Most tokens that fit behind the prompt.
    """
    asked = most_tokens(body)
    most = room if asked is None else min(asked, room)
    if asked is not None and body.min_tokens > asked:
        refuse("min_tokens", f"min_tokens must be 0 .. max_tokens={asked}, got {shown(body.min_tokens)}")
    return Generation(
        max_new_tokens=most,
        min_tokens=min(body.min_tokens, most),
        stop=tuple(body.stops),
        stop_token_ids=tuple(body.stop_token_ids),
        logprobs=logprobs_of(body, gateway.service.limits.max_logprobs),
        ignore_eos=body.ignore_eos,
        allowed_token_ids=body.allowed_token_ids,
        bad_words=tuple(body.bad_words),
    )


def most_tokens(body: GenerationBody) -> int | None:
    """Most tokens of an output; None: as many as fit."""
    if isinstance(body, ChatBody):
        found, name = body.max_completion_tokens or body.max_tokens, "max_completion_tokens"
    else:
        found, name = 16 if body.max_tokens is None else body.max_tokens, "max_tokens"
    if (found == 0 or body.max_tokens == 0) and not (isinstance(body, CompletionBody) and body.echo):
        refuse("max_tokens", f"{name} must be >= 1; 0 is for completions with echo, got 0")
    return found


def logprobs_of(body: GenerationBody, limit: int) -> int | None:
    """Which log-probabilities are asked for: None, or the number of likeliest tokens."""
    if isinstance(body, CompletionBody):
        found, name = body.logprobs, "logprobs"
    elif isinstance(body, ChatBody):
        name = "top_logprobs"
        if body.top_logprobs and not body.logprobs:
            refuse(name, "top_logprobs needs logprobs: true")
        found = (body.top_logprobs or 0) if body.logprobs else None
    else:
        return None
    if found is not None and not 0 <= found <= limit:
        refuse(name, f"{name} must be 0 .. {limit}, got {shown(found)}")
    return found


def _biases(body: GenerationBody) -> dict[int, float]:
    """Biases by token id; JSON writes them as texts."""
    try:
        return {int(token): bias for token, bias in body.logit_bias.items()}
    except ValueError:
        wrong = next(token for token in body.logit_bias if not token.strip().lstrip("+-").isdecimal())
        refuse("logit_bias", f"logit_bias maps token ids to numbers, got the token {shown(wrong)}")
