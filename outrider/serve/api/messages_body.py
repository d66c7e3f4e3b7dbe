"""The body of a request to /v1/messages, and the conversation that it is."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from outrider.core.inputs import shown
from outrider.serve.api.bodies import (
    Body,
    Effort,
    Function,
    FunctionName,
    JsonSchema,
    NamedTool,
    ResponseFormat,
    SamplingBody,
    Tool,
)
from outrider.serve.api.gateway import Gateway
from outrider.serve.api.grammars import ToolUse
from outrider.serve.api.prompts import field_of, listed, part_of, template_arguments, text_of
from outrider.serve.errors import refuse_field
from outrider.serve.run.templates import ChatPrompt

LEAST_BUDGET = 1024
"""Fewest tokens of thinking that a client may ask for."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""OpenAI's words for Anthropic's choices of tools."""


class Message(Body):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class AnthropicTool(Body):
    """A tool that the model may call."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None


class ToolChoice(Body):
    """Whether and which tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None


class OutputFormat(Body):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema_: Any = Field(default=None, alias="schema")


class OutputConfig(Body):
    """What the answer is like."""

    format: OutputFormat | None = None
    effort: Effort | None = None


class CountRequest(SamplingBody):
    """A request to /v1/messages/count_tokens: what the prompt is made of."""

    messages: list[Message] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def tool_use(self, gateway: Gateway) -> ToolUse:
        """The tools that the model may or must call."""
        choice, several = self.tool_choice, True
        named: str | NamedTool | None = None
        if choice is not None:
            if choice.type == "tool" and choice.name is None:
                refuse_field("tool_choice.name", "must name the tool to call")
            named = CHOICES.get(choice.type) or NamedTool(function=FunctionName(name=str(choice.name)))
            several = not choice.disable_parallel_tool_use
        tools = [_tool(each, number) for number, each in enumerate(self.tools or ())] or None
        return ToolUse.of(tools, named, several=several, limits=gateway.service.limits)

    def prompt(self, gateway: Gateway, tools: ToolUse) -> ChatPrompt:
        """What the chat template makes a prompt of. An answer continues the assistant's last message.

        Raises:
            ServeError: A block cannot be followed. The message names the field.
        """
        messages = [] if self.system is None else [{"role": "system", "content": text_of(self.system, "system")}]
        for number, message in enumerate(self.messages):
            messages += _messages(message, f"messages.{number}")
        arguments = dict(self.chat_template_kwargs)
        if self.thinking is not None:
            arguments = {"enable_thinking": self.thinking.type != "disabled"} | arguments
        continues = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
        return ChatPrompt(
            messages=messages,
            tools=listed(gateway, tools),
            arguments=template_arguments(arguments, None if self.output_config is None else self.output_config.effort),
            generation_prompt=not continues,
            continue_final=continues,
        )


class MessagesRequest(CountRequest):
    """A request to /v1/messages."""

    max_tokens: int = Field(gt=0)
    stop_sequences: list[str] | None = None

    @property
    def form(self) -> ResponseFormat | None:
        """The form of the output."""
        format = None if self.output_config is None else self.output_config.format
        if format is None:
            return self.response_format
        return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=format.schema_))

    def check(self) -> None:
        """Raise ServeError for what is not supported."""
        if self.thinking is None or self.thinking.type != "enabled":
            return
        budget, most = self.thinking.budget_tokens, self.max_tokens
        if budget is None or not LEAST_BUDGET <= budget < most:
            words = f"must be >= {LEAST_BUDGET} and below max_tokens ({most}), got {shown(budget)}"
            refuse_field("thinking.budget_tokens", words)


def _messages(message: Message, place: str) -> list[dict[str, Any]]:
    """The chat messages of one message: results of tools become messages of their own."""
    if isinstance(message.content, str) or message.role == "system":
        return [{"role": message.role, "content": text_of(message.content, f"{place}.content")}]
    return (_of_user if message.role == "user" else _of_assistant)(message.content, place)


def _of_user(blocks: Sequence[Mapping[str, Any]], place: str) -> list[dict[str, Any]]:
    """The messages of a user's blocks, in their order."""
    messages: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        if block.get("type") == "tool_result":
            content = text_of(block.get("content") or "", f"{place}.content.{number}.content")
            id = field_of(block, "tool_use_id", f"{place}.content.{number}")
            messages.append({"role": "tool", "tool_call_id": id, "content": content})
        else:
            text = part_of(block, f"{place}.content.{number}")
            if messages and messages[-1]["role"] == "user":
                messages[-1]["content"] += text
            else:
                messages.append({"role": "user", "content": text})
    return messages or [{"role": "user", "content": ""}]


def _of_assistant(blocks: Sequence[Mapping[str, Any]], place: str) -> list[dict[str, Any]]:
    """The message of an assistant's blocks."""
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for number, block in enumerate(blocks):
        at = f"{place}.content.{number}"
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(field_of(block, "thinking", at))
        elif kind == "tool_use":
            function = {"name": field_of(block, "name", at), "arguments": block.get("input") or {}}
            calls.append({"id": field_of(block, "id", at), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            texts.append(part_of(block, at))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message |= dict.fromkeys(("reasoning", "reasoning_content"), "".join(thoughts))
    if calls:
        message["tool_calls"] = calls
    return [message]


def _tool(tool: AnthropicTool, number: int) -> Tool:
    """A tool in the format of chat completions."""
    if tool.type not in (None, "custom"):
        refuse_field(
            f"tools.{number}", f"a tool of type {shown(tool.type)} is not supported; give name and input_schema"
        )
    schema = {"type": "object"} | (tool.input_schema or {})
    function = Function(name=tool.name, description=tool.description or "", parameters=schema, strict=tool.strict)
    return Tool(type="function", function=function)
