"""The body of a request to /v1/responses, and the conversation that it is. Nothing is stored between requests."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from outrider.core.inputs import shown
from outrider.serve.api.bodies import Effort, NamedTool, ResponseFormat, SamplingBody, Tool, checked
from outrider.serve.api.gateway import Gateway
from outrider.serve.api.grammars import ToolUse
from outrider.serve.api.prompts import arguments_of, field_of, listed, template_arguments, text_of
from outrider.serve.errors import refuse_field, refuse_key
from outrider.serve.run.templates import ChatPrompt

LOGPROBS = "message.output_text.logprobs"
CHOICES = ("none", "auto", "required")
"""Choices of tools that name none."""


class ResponsesRequest(SamplingBody):
    """A request to /v1/responses."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
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
    def logprobs(self) -> int | None:
        """How many of the likeliest tokens come with the log-probabilities; None: no log-probabilities."""
        return self.top_logprobs or 0 if LOGPROBS in (self.include or ()) or self.top_logprobs else None

    @property
    def form(self) -> ResponseFormat | None:
        """The form of the output."""
        format = (self.text or {}).get("format")
        if self.response_format is not None or format is None:
            return self.response_format
        if format.get("type") == "json_schema":
            fields = {name: value for name, value in format.items() if name != "type"}
            format = {"type": "json_schema", "json_schema": fields}
        return checked(ResponseFormat, format, "text.format")

    def check(self, limit: int) -> None:
        """Refuse what needs a store, or runs elsewhere.

        Args:
            limit: Most log-probabilities at each position.
        """
        for name in ("previous_response_id", "conversation", "prompt"):
            if getattr(self, name) is not None:
                refuse_key(name, "no response is stored; send the whole input")
        if self.background:
            refuse_key("background", "stream the response instead")
        if self.truncation not in (None, "disabled"):
            refuse_field("truncation", f"must be 'disabled', got {shown(self.truncation)}; send a shorter input")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            refuse_field("max_output_tokens", f"must be >= 1, got {shown(self.max_output_tokens)}")
        if self.logprobs is not None and not 0 <= self.logprobs <= limit:
            refuse_field("top_logprobs", f"must be 0 .. {limit}, got {shown(self.logprobs)}")

    def tool_use(self, gateway: Gateway) -> ToolUse:
        """The tools that the model may or must call."""
        tools = [_tool(each, f"tools.{number}") for number, each in enumerate(self.tools or ())] or None
        choice = None if self.tool_choice is None or tools is None else _choice(self.tool_choice)
        several = self.parallel_tool_calls is not False
        return ToolUse.of(tools, choice, several=several, limits=gateway.service.limits)

    def chat_prompt(self, gateway: Gateway, tools: ToolUse) -> ChatPrompt:
        """What the chat template makes a prompt of.

        Raises:
            ServeError: An item cannot be followed. The message names the field.
        """
        messages = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        messages += _messages(self.input)
        if not messages:
            refuse_field("input", "is empty; give a text, or at least one message")
        effort = (self.reasoning or {}).get("effort")
        if effort is not None and effort not in get_args(Effort):
            refuse_field("reasoning.effort", f"must be one of {', '.join(get_args(Effort))}, got {shown(effort)}")
        arguments = template_arguments(self.chat_template_kwargs, effort)
        return ChatPrompt(messages=messages, tools=listed(gateway, tools), arguments=arguments)


def _messages(input: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The chat messages of an input. Reasoning and calls become part of the assistant's message beside them."""
    if isinstance(input, str):
        return [{"role": "user", "content": input}]
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(input):
        place, kind = f"input.{number}", item.get("type", "message")
        if kind == "message":
            _add_message(messages, item, place)
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or ()
            thought = "".join(str(part.get("text", "")) for part in parts)
            messages.append({"role": "assistant", "reasoning": thought, "reasoning_content": thought})
        elif kind == "function_call":
            arguments = arguments_of(field_of(item, "arguments", place), f"{place}.arguments")
            function = {"name": field_of(item, "name", place), "arguments": arguments}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant"})
            call = {"id": field_of(item, "call_id", place), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = text_of(item.get("output") or "", f"{place}.output")
            messages.append({"role": "tool", "tool_call_id": field_of(item, "call_id", place), "content": content})
        else:
            refuse_field(place, f"an item of type {shown(kind)} is not supported")
    for message in messages:
        message.setdefault("content", "")
    return messages


def _add_message(messages: list[dict[str, Any]], item: Mapping[str, Any], place: str) -> None:
    role = field_of(item, "role", place)
    if role not in ("user", "assistant", "system", "developer"):
        refuse_field(f"{place}.role", f"must be user, assistant, system or developer, got {shown(role)}")
    content = text_of(item.get("content") or "", f"{place}.content")
    if role == "assistant" and messages and set(messages[-1]) == {"role", "reasoning", "reasoning_content"}:
        messages[-1]["content"] = content
    else:
        messages.append({"role": "system" if role == "developer" else role, "content": content})


def _tool(tool: Mapping[str, Any], place: str) -> Tool:
    """A tool in the format of chat completions."""
    if tool.get("type") != "function":
        refuse_field(place, f"a tool of type {shown(tool.get('type'))} is not supported; give a function")
    fields = {name: tool[name] for name in ("description", "parameters", "strict") if tool.get(name) is not None}
    return checked(Tool, {"type": "function", "function": {"name": field_of(tool, "name", place), **fields}}, place)


def _choice(choice: str | Mapping[str, Any]) -> str | NamedTool:
    """`tool_choice` in the format of chat completions."""
    if isinstance(choice, str):
        if choice not in CHOICES:
            refuse_field("tool_choice", f"must be one of {', '.join(CHOICES)}, or name a function, got {shown(choice)}")
        return choice
    if choice.get("type") != "function":
        refuse_field("tool_choice", f"of type {shown(choice.get('type'))} is not supported; name a function")
    return checked(NamedTool, {"function": {"name": field_of(choice, "name", "tool_choice")}}, "tool_choice")
