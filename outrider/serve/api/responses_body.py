"""A request to /v1/responses, and the chat completion that answers it. Nothing is stored between requests."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from outrider.core.inputs import shown
from outrider.serve.api.bodies import Body
from outrider.serve.api.errors import refuse, refuse_key
from outrider.serve.api.options import passed_on

PASSED = ("chat_template_kwargs", "parallel_tool_calls", "vllm_xargs", "user")
"""Fields that chat completions read under the same name, besides those of all routes that generate."""
LOGPROBS = "message.output_text.logprobs"
TEXTS = ("input_text", "output_text", "text", "refusal")
"""Types of content parts that are text."""


class ResponsesRequest(Body):
    """A request to /v1/responses."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    stream: bool | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    truncation: str | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether each text comes with the log-probabilities of its tokens."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)


def chat_body(request: ResponsesRequest) -> dict[str, Any]:
    """The body of the chat completion that answers a request; it always streams.

    Raises:
        ApiError: The request wants what is not supported. The message names the field.
    """
    _check(request)
    messages = [] if request.instructions is None else [{"role": "system", "content": request.instructions}]
    messages += _messages(request.input)
    if not messages:
        _wrong("input", "is empty; give a text, or at least one message")
    body = {
        "model": request.model,
        "messages": messages,
        "max_completion_tokens": request.max_output_tokens,
        "reasoning_effort": (request.reasoning or {}).get("effort"),
        "response_format": _format((request.text or {}).get("format")),
        "stream": True,
        "stream_options": {"include_usage": True},
        **passed_on(request),
        **{name: request.given(name) for name in PASSED},
    }
    if request.tools:
        body["tools"] = [_tool(each, f"tools.{number}") for number, each in enumerate(request.tools)]
    if request.tool_choice is not None and request.tools:
        body["tool_choice"] = _choice(request.tool_choice)
    if request.wants_logprobs:
        body |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    return {name: value for name, value in body.items() if value is not None}


def _check(request: ResponsesRequest) -> None:
    """Refuse what needs a store, or runs elsewhere."""
    stored = {name: getattr(request, name) for name in ("previous_response_id", "conversation", "prompt")}
    for name, value in stored.items():
        if value is not None:
            refuse_key(name, "no response is stored; send the whole input")
    if request.background:
        refuse_key("background", "stream the response instead")
    if request.truncation not in (None, "disabled"):
        _wrong("truncation", f"must be 'disabled', got {shown(request.truncation)}; send a shorter input")


def _messages(input: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The chat messages of an input. Reasoning and calls become part of the assistant's message beside them."""
    if isinstance(input, str):
        return [{"role": "user", "content": input}]
    found: list[dict[str, Any]] = []
    for number, item in enumerate(input):
        place, kind = f"input.{number}", item.get("type", "message")
        if kind == "message":
            _add_message(found, item, place)
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or ()
            found.append({"role": "assistant", "reasoning": "".join(str(part.get("text", "")) for part in parts)})
        elif kind == "function_call":
            function = {name: _text(item, name, place) for name in ("name", "arguments")}
            call = {"id": _text(item, "call_id", place), "type": "function", "function": function}
            _open(found).setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _content(item.get("output") or "", f"{place}.output")
            found.append({"role": "tool", "tool_call_id": _text(item, "call_id", place), "content": content})
        else:
            _wrong(place, f"an item of type {shown(kind)} is not supported")
    for message in found:
        message.setdefault("content", "")
    return found


def _add_message(found: list[dict[str, Any]], item: Mapping[str, Any], place: str) -> None:
    role = _text(item, "role", place)
    if role not in ("user", "assistant", "system", "developer"):
        _wrong(f"{place}.role", f"must be user, assistant, system or developer, got {shown(role)}")
    content = _content(item.get("content") or "", f"{place}.content")
    if role == "assistant" and found and set(found[-1]) == {"role", "reasoning"}:
        found[-1]["content"] = content
    else:
        found.append({"role": role, "content": content})


def _open(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message that a call belongs to."""
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant"})
    return found[-1]


def _content(content: str | Sequence[Mapping[str, Any]], place: str) -> str:
    """The text of a content."""
    if isinstance(content, str):
        return content
    for number, part in enumerate(content):
        if part.get("type") not in TEXTS:
            _wrong(f"{place}.{number}", f"a part of type {shown(part.get('type'))} is not supported; send text")
    return "".join(str(part.get("text", part.get("refusal", ""))) for part in content)


def _text(item: Mapping[str, Any], name: str, place: str) -> str:
    """A field that must be a text."""
    if not isinstance(found := item.get(name), str):
        _wrong(f"{place}.{name}", f"must be a text, got {shown(found)}")
    return found


def _tool(tool: Mapping[str, Any], place: str) -> dict[str, Any]:
    """A tool in the format of chat completions."""
    if tool.get("type") != "function":
        _wrong(place, f"a tool of type {shown(tool.get('type'))} is not supported; give a function")
    fields = {name: tool[name] for name in ("description", "parameters", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {"name": _text(tool, "name", place), **fields}}


def _choice(choice: str | Mapping[str, Any]) -> str | dict[str, Any]:
    """`tool_choice` in the format of chat completions."""
    if isinstance(choice, str):
        return choice
    if choice.get("type") != "function":
        _wrong("tool_choice", f"of type {shown(choice.get('type'))} is not supported; name a function")
    return {"type": "function", "function": {"name": _text(choice, "name", "tool_choice")}}


def _format(format: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """`text.format` in the format of chat completions."""
    if format is None or format.get("type") == "text":
        return None
    if format.get("type") == "json_schema":
        fields = {name: value for name, value in format.items() if name != "type"}
        return {"type": "json_schema", "json_schema": fields}
    return dict(format)


def _wrong(place: str, words: str) -> NoReturn:
    """Raise the error for a field that cannot be followed."""
    refuse(place, f"{place}: {words}")
