"""The conversation of a request, as the chat template takes it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.core.inputs import shown
from outrider.engine.prompts import OPENING, reads
from outrider.serve.api.bodies import ChatBody, ChatMessage, TokenizeBody
from outrider.serve.api.gateway import Gateway
from outrider.serve.api.grammars import ToolUse
from outrider.serve.errors import refuse
from outrider.serve.run.parser import REASONING
from outrider.serve.run.templates import ChatPrompt

TEXTS = ("text", "input_text", "output_text")
"""Types of parts that are text."""


def messages_of(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages. Raises ServeError for parts that are no text."""
    return [_message(each, f"messages.{i}") for i, each in enumerate(messages)]


def chat_prompt(gateway: Gateway, body: ChatBody | TokenizeBody, tools: ToolUse) -> ChatPrompt:
    """What the chat template makes a prompt of. Raises ServeError if there is no template, or if the request brings
    one that it may not bring.
    """
    if body.chat_template is not None and not gateway.settings.request_chat_templates:
        refuse(
            "chat_template",
            "this server takes no chat template from requests; leave it out, or start the server with "
            "--trust-request-chat-template",
            "unsupported_parameter",
        )
    effort = body.reasoning_effort if isinstance(body, ChatBody) else None
    arguments = template_arguments(body.chat_template_kwargs, effort)
    return ChatPrompt(
        messages=messages_of(body.messages or ()),
        tools=listed(gateway, tools, body.chat_template),
        documents=body.documents if isinstance(body, ChatBody) else None,
        arguments=arguments if body.chat_template is None else arguments | {"chat_template": body.chat_template},
        generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final=body.continue_final_message,
    )


def template_arguments(arguments: Mapping[str, Any], effort: str | None) -> dict[str, Any]:
    """Arguments of the template, the effort of the reasoning among them.

    Raises:
        ServeError: One has a field of its own. A chat template is a program, which not every server takes.
    """
    for name in OPENING:
        if name in arguments:
            refuse("chat_template_kwargs", f"chat_template_kwargs holds {name}, which is a field of its own")
    # The service leaves out what the template does not read.
    named = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return named | dict(arguments)


def listed(gateway: Gateway, tools: ToolUse, template: str | None = None) -> list[dict[str, Any]] | None:
    """The tools that the template is told of. It need not know those that a grammar forces."""
    tokenizer = gateway.service.tokenizer
    if tokenizer.chat_template is None and template is None:
        refuse("messages", "the model has no chat template; start the server with --chat-template FILE")
    if tools.forced and not reads(tokenizer.get_chat_template(template, tools.listed), "tools"):
        return None
    return tools.listed or None


def text_of(content: str | Sequence[Mapping[str, Any]], where: str) -> str:
    """The text of a content, which may come in parts. Raises ServeError for parts that are no text."""
    return content if isinstance(content, str) else "".join(part_of(e, f"{where}.{i}") for i, e in enumerate(content))


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    fields |= {name: value for name, value in (message.model_extra or {}).items() if value is not None}
    content = None if message.content is None else text_of(message.content, f"{where}.content")
    if content is None and not message.tool_calls:
        refuse(f"{where}.content", f"{where}.content is missing; a message needs content, or tool_calls")
    fields["content"] = content or ""
    if message.tool_calls:
        fields["tool_calls"] = [_call(each, f"{where}.tool_calls.{i}") for i, each in enumerate(message.tool_calls)]
    reasoning = next((fields[name] for name in REASONING if isinstance(fields.get(name), str)), None)
    if reasoning is not None:
        fields["reasoning_content"] = reasoning
    return fields


def part_of(part: Mapping[str, Any], where: str) -> str:
    """The text of a part of a content."""
    if part.get("type") in TEXTS and isinstance(part.get("text"), str):
        return str(part["text"])
    if part.get("type") == "refusal" and isinstance(part.get("refusal"), str):
        return str(part["refusal"])
    refuse(where, f"{where} must be a text, {{'type': 'text', 'text': ...}}; got type {shown(part.get('type'))}")


def field_of(item: Mapping[str, Any], name: str, where: str) -> str:
    """A field that must be a text."""
    if not isinstance(text := item.get(name), str):
        refuse(f"{where}.{name}", f"{where}.{name} must be a text, got {shown(text)}")
    return text


def _call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A call of an earlier answer."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        refuse(where, f"{where} needs a function with a name")
    arguments = arguments_of(function.get("arguments", {}), f"{where}.function.arguments")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def arguments_of(arguments: Any, where: str) -> Any:
    """The arguments of a call, which templates want as an object."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        refuse(where, f"{where} is not JSON")
