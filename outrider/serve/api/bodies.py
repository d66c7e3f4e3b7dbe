"""The bodies of requests: read within limits, as JSON, as a checked model. A field that is null counts as not given;
fields that nobody knows are ignored.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.requests import Request

from outrider.core.inputs import shown
from outrider.serve.errors import ServeError, refuse
from outrider.serve.limits import Limits

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Read = TypeVar("Read", bound=BaseModel)
MOST_ERRORS = 10
"""Most wrong fields that an answer lists."""


class Body(BaseModel):
    """What all bodies have in common."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


class StreamOptions(Body):
    """What a stream says besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Body):
    """A named schema."""

    name: str = "schema"
    schema_: Any = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of the output."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """vLLM's way to ask for a form of the output: exactly one of its kinds."""

    json_: dict[str, Any] | str | bool | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(default=None, min_length=1)
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None


class SpeculationBody(Body):
    """Speculation of this request; what is not given is as the server was started.

    `enabled` false, or `max_tokens` 0, drafts nothing. `max_context`: no token is drafted behind more tokens.
    """

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    enabled: bool | None = None
    max_tokens: int | None = Field(default=None, ge=0)
    drafter: str | None = None
    verifier: str | None = None
    tree: str | None = None
    max_context: int | None = Field(default=None, ge=0)
    policy: Literal["auto"] | None = None


class PredictionBody(Body):
    """A text that the output may repeat."""

    type: Literal["content"] = "content"
    content: str | list[dict[str, Any]]


class OutputsBody(Body):
    """What completions and chat completions say of their outputs."""

    max_tokens: int | None = Field(default=None, ge=0)
    n: int = Field(default=1, ge=1)
    stream_options: StreamOptions | None = None
    stream_interval: int = Field(default=1, ge=1)
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    request_id: str | None = None
    user: str | None = None


class SamplingBody(Body):
    """What all routes that generate read, whatever their format."""

    model: str | None = None
    stream: bool = False
    min_tokens: int = Field(default=0, ge=0)
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] = {}
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "left"
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    speculation: SpeculationBody | bool | None = None
    prediction: PredictionBody | None = None
    chat_template_kwargs: dict[str, Any] = {}
    priority: int = 0


class GenerationBody(SamplingBody, OutputsBody):
    """What completions and chat completions have in common."""


class CompletionBody(GenerationBody):
    """The body of `POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool = True


class ChatMessage(Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class Function(Body):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The tool that the model must call."""

    type: Literal["function"] = "function"
    function: FunctionName


class ChatBody(GenerationBody):
    """The body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: Effort | None = None
    include_reasoning: bool = True
    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: list[dict[str, Any]] | None = None


class TokenizeBody(Body):
    """The body of `POST /tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1)
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    tools: list[Tool] | None = None


class DrafterBody(Body):
    """The body of `POST /v1/admin/drafter`."""

    drafter: str


class DetokenizeBody(Body):
    """The body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[int]


async def read(request: Request, model: type[Read], limits: Limits) -> Read:
    """The request's body. Reading stops as soon as it is too long, whatever its header says.

    Raises:
        ServeError: The body is too long, not JSON, or its fields are wrong.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ServeError(415, f"the body must be JSON (Content-Type: application/json), got {shown(kind)}")
    body = b"".join([chunk async for chunk in _chunks(request, limits.max_body_bytes)])
    try:
        value = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        refuse(None, f"the body is not JSON: {error}", "invalid_json")
    if deeper(value, limits.max_json_depth):
        refuse(None, f"the body's JSON is nested more than {limits.max_json_depth} levels deep", "invalid_json")
    if not isinstance(value, dict):
        refuse(None, "the body must be a JSON object", "invalid_json")
    return checked(model, value)


def checked(model: type[Read], value: Any, place: str = "") -> Read:
    """A value as a model. Raises ServeError if fields are wrong.

    Args:
        place: The field of the body that it is.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise of_fields(error.errors(include_url=False, include_context=False), value, place) from None


def of_fields(errors: Sequence[Mapping[str, Any]], value: Any, place: str = "") -> ServeError:
    """The answer to wrong fields; the arguments are those of `checked`."""
    fields: dict[str, list[str]] = {}
    for each in errors:
        path, wrong = _path(each["loc"], value, missing=each["type"] == "missing")
        known = {"missing": "is missing", "extra_forbidden": "is unknown"}
        message = known.get(each["type"]) or _lower(each["msg"]) + f", got {shown(wrong)}"
        messages = fields.setdefault(".".join(filter(None, (place, path))), [])
        if message not in messages:
            messages.append(message)
    lines = [f"{path or 'the body'}: {' or '.join(messages[:3])}" for path, messages in fields.items()]
    more = f"; and {len(lines) - MOST_ERRORS} more" if len(lines) > MOST_ERRORS else ""
    return ServeError(400, "; ".join(lines[:MOST_ERRORS]) + more, param=next(iter(fields)) or None)


async def save(request: Request, place: Path, most: int) -> None:
    """Write the body to a file. Raises ServeError as soon as it is too long."""
    with place.open("wb") as file:
        async for chunk in _chunks(request, most):
            await asyncio.to_thread(file.write, chunk)


async def _chunks(request: Request, most: int) -> AsyncIterator[bytes]:
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and (len(announced) > 18 or int(announced) > most):
        raise _too_large(most)
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > most:
            raise _too_large(most)
        yield chunk


def _too_large(most: int) -> ServeError:
    return ServeError(413, f"the body is longer than {most} bytes; shorten it", headers={"connection": "close"})


def deeper(value: Any, most: int) -> bool:
    """Whether a value of JSON is nested more than `most` levels deep."""
    level = [value]
    for _ in range(most):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _path(places: Sequence[int | str], value: Any, *, missing: bool) -> tuple[str, Any]:
    """The path of a field with dots, and what stands there. Names of types, which pydantic adds, are left out."""
    path: list[str] = []
    for i, place in enumerate(places):
        inside = place in value if isinstance(value, Mapping) else isinstance(place, int) and _holds(value, place)
        if inside:
            value = value[place]
        elif not (missing and i == len(places) - 1):
            continue
        path.append(str(place)[:200])
    return ".".join(path), value


def _holds(value: Any, place: int) -> bool:
    return isinstance(value, list) and place < len(value)


def _lower(message: str) -> str:
    """pydantic's message as the end of a sentence."""
    end = message.removeprefix("Value error, ").removeprefix("Input ")
    return end[:1].lower() + end[1:]
