"""The bodies of requests. A field that is null counts as not given; fields that nobody knows are ignored."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


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
