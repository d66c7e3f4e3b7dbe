"""A request to /v1/messages, and the chat completion that answers it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn

from pydantic import Field

from outrider.core.inputs import shown
from outrider.serve.api.bodies import Body
from outrider.serve.api.errors import refuse
from outrider.serve.api.options import passed_on

LEAST_BUDGET = 1024
"""Fewest tokens of thinking that a client may ask for."""
PASSED = ("chat_template_kwargs", "vllm_xargs")
"""Fields that are not Anthropic's and that chat completions read too, besides those of all routes that generate."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class Message(Body):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class AnthropicTool(Body):
    """A tool that the model may call."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None


class ToolChoice(Body):
    """Whether and which tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None


class CountRequest(Body):
    """A request to /v1/messages/count_tokens: what the prompt is made of."""

    model: str | None = None
    messages: list[Message] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: dict[str, Any] | None = None


class MessagesRequest(CountRequest):
    """A request to /v1/messages."""

    max_tokens: int = Field(gt=0)
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None


def chat_body(request: MessagesRequest) -> dict[str, Any]:
    """The body of the chat completion that answers a request; it always streams, with token counts in every chunk.

    Raises:
        ApiError: The request wants what is not supported. The message names the field.
    """
    if request.thinking is not None and request.thinking.type == "enabled":
        _check_budget(request.thinking.budget_tokens, request.max_tokens)
    body = prompt_body(request) | {
        "max_completion_tokens": request.max_tokens,
        "stop": request.stop_sequences,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    return {name: value for name, value in body.items() if value is not None}


def prompt_body(request: CountRequest) -> dict[str, Any]:
    """The fields of a chat completion that make the prompt."""
    messages = [] if request.system is None else [{"role": "system", "content": text_of(request.system, "system")}]
    for number, message in enumerate(request.messages):
        messages += _messages(message, f"messages.{number}")
    passed = passed_on(request) | {name: value for name in PASSED if (value := request.given(name)) is not None}
    body = {"model": request.model, "messages": messages, **passed}
    if messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        # The answer continues the last message.
        body |= {"add_generation_prompt": False, "continue_final_message": True}
    if request.tools:
        body["tools"] = [_tool(each, number) for number, each in enumerate(request.tools)]
    if request.tool_choice is not None:
        body |= _choice(request.tool_choice)
    if request.thinking is not None:
        wanted = {"enable_thinking": request.thinking.type != "disabled"}
        body["chat_template_kwargs"] = wanted | body.get("chat_template_kwargs", {})
    return body | _output(request.output_config or {})


def text_of(content: str | Sequence[Mapping[str, Any]], place: str) -> str:
    """The text of a content.

    Args:
        place: The field, for the error message.

    Raises:
        ApiError: A block is no text.
    """
    if isinstance(content, str):
        return content
    for number, block in enumerate(content):
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            _wrong(f"{place}.{number}", f"a block of type {shown(block.get('type'))} is not supported here; send text")
    return "".join(block["text"] for block in content)


def _messages(message: Message, place: str) -> list[dict[str, Any]]:
    """The chat messages of one message: results of tools become messages of their own."""
    if isinstance(message.content, str) or message.role == "system":
        return [{"role": message.role, "content": text_of(message.content, place)}]
    return _asked(message.content, place) if message.role == "user" else [_answered(message.content, place)]


def _asked(blocks: Sequence[Mapping[str, Any]], place: str) -> list[dict[str, Any]]:
    """The messages of a user's blocks, in their order."""
    found: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        if block.get("type") == "tool_result":
            content = text_of(block.get("content") or "", f"{place}.content.{number}.content")
            id = _text(block, "tool_use_id", f"{place}.content.{number}")
            found.append({"role": "tool", "tool_call_id": id, "content": content})
        else:
            text = text_of([block], f"{place}.content")
            if found and found[-1]["role"] == "user":
                found[-1]["content"] += text
            else:
                found.append({"role": "user", "content": text})
    return found or [{"role": "user", "content": ""}]


def _answered(blocks: Sequence[Mapping[str, Any]], place: str) -> dict[str, Any]:
    """The message of an assistant's blocks."""
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for number, block in enumerate(blocks):
        at = f"{place}.content.{number}"
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(_text(block, "thinking", at))
        elif kind == "tool_use":
            given = json.dumps(block.get("input") or {}, ensure_ascii=False)
            function = {"name": _text(block, "name", at), "arguments": given}
            calls.append({"id": _text(block, "id", at), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            texts.append(text_of([block], f"{place}.content"))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _text(block: Mapping[str, Any], name: str, place: str) -> str:
    """A field that must be a text."""
    if not isinstance(found := block.get(name), str):
        _wrong(f"{place}.{name}", f"must be a text, got {shown(found)}")
    return found


def _tool(tool: AnthropicTool, number: int) -> dict[str, Any]:
    """A tool in the format of chat completions."""
    if tool.type not in (None, "custom"):
        _wrong(f"tools.{number}", f"a tool of type {shown(tool.type)} is not supported; give name and input_schema")
    schema = {"type": "object"} | (tool.input_schema or {})
    function = {"name": tool.name, "description": tool.description or "", "parameters": schema}
    if tool.given("strict") is not None:
        function["strict"] = tool.given("strict")
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> dict[str, Any]:
    """`tool_choice` in the format of chat completions."""
    if choice.type == "tool" and choice.name is None:
        _wrong("tool_choice.name", "must name the tool to call")
    named = {"type": "function", "function": {"name": choice.name}}
    found: dict[str, Any] = {"tool_choice": CHOICES.get(choice.type, named)}
    return found | ({"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {})


def _output(config: Mapping[str, Any]) -> dict[str, Any]:
    """What `output_config` asks of the answer."""
    found: dict[str, Any] = {}
    if (format := config.get("format")) is not None:
        if not isinstance(format, Mapping) or format.get("type") != "json_schema":
            _wrong("output_config.format", f"must be of type json_schema, got {shown(format)}")
        found["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": format.get("schema"), "strict": True},
        }
    if config.get("effort") is not None:
        found["reasoning_effort"] = config["effort"]
    return found


def _check_budget(budget: int | None, most: int) -> None:
    """A budget of thinking must leave room for the answer."""
    if budget is None or not LEAST_BUDGET <= budget < most:
        given = shown(budget)
        _wrong("thinking.budget_tokens", f"must be >= {LEAST_BUDGET} and below max_tokens ({most}), got {given}")


def _wrong(place: str, words: str) -> NoReturn:
    """Raise the error for a field that cannot be followed."""
    refuse(place, f"{place}: {words}")
