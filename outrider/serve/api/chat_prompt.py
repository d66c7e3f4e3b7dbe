"""The messages of a chat, as the chat template takes them."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from outrider.core.inputs import shown
from outrider.serve.api.bodies import ChatBody, ChatMessage, TokenizeBody
from outrider.serve.api.errors import refuse
from outrider.serve.api.gateway import Gateway
from outrider.serve.run.parser import REASONING

OURS = ("chat_template", "add_generation_prompt", "continue_final_message")
TEXTS = ("text", "input_text", "output_text")
"""Types of parts that are text."""


def messages_of(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages. Raises ApiError for parts that are no text."""
    return [_message(each, f"messages.{i}") for i, each in enumerate(messages)]


def arguments_of(body: ChatBody | TokenizeBody) -> dict[str, Any]:
    """Other arguments of the template. The effort of the reasoning is one of them."""
    found = dict(body.chat_template_kwargs)
    if body.chat_template is not None:
        found["chat_template"] = body.chat_template
    effort = body.reasoning_effort if isinstance(body, ChatBody) else None
    if effort is not None:
        # The service leaves out what the template does not read.
        found = {"reasoning_effort": effort, "enable_thinking": effort != "none"} | found
    return found


def check_template(gateway: Gateway, body: ChatBody | TokenizeBody) -> None:
    """Raise ApiError if there is no template, or if the request brings one that it may not bring."""
    for name in OURS:
        if name in body.chat_template_kwargs:
            refuse("chat_template_kwargs", f"chat_template_kwargs holds {name}, which is a field of its own")
    if body.chat_template is not None and not gateway.settings.request_chat_templates:
        refuse(
            "chat_template",
            "this server takes no chat template from requests; leave it out, or start the server with "
            "--trust-request-chat-template",
            "unsupported_parameter",
        )
    if gateway.service.tokenizer.chat_template is None and body.chat_template is None:
        refuse("messages", "the model has no chat template; start the server with --chat-template FILE")


def reads(tokenizer: PreTrainedTokenizerBase, name: str, template: str | None = None) -> bool:
    """Whether the chat template reads a variable."""
    given = template or tokenizer.chat_template
    texts = [given] if isinstance(given, str) else list((given or {}).values())
    return any(re.search(rf"\b{re.escape(name)}\b", text) for text in texts)


def text_of(content: str | Sequence[Mapping[str, Any]], where: str) -> str:
    """The text of a content, which may come in parts. Raises ApiError for parts that are no text."""
    return content if isinstance(content, str) else "".join(_part(e, f"{where}.{i}") for i, e in enumerate(content))


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    found: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    found |= {name: value for name, value in (message.model_extra or {}).items() if value is not None}
    content = None if message.content is None else text_of(message.content, f"{where}.content")
    if content is None and not message.tool_calls:
        refuse(f"{where}.content", f"{where}.content is missing; a message needs content, or tool_calls")
    found["content"] = content or ""
    if message.tool_calls:
        found["tool_calls"] = [_call(each, f"{where}.tool_calls.{i}") for i, each in enumerate(message.tool_calls)]
    reasoning = next((found[name] for name in REASONING if isinstance(found.get(name), str)), None)
    if reasoning is not None:
        found["reasoning_content"] = reasoning
    return found


def _part(part: Mapping[str, Any], where: str) -> str:
    if part.get("type") in TEXTS and isinstance(part.get("text"), str):
        return str(part["text"])
    if part.get("type") == "refusal" and isinstance(part.get("refusal"), str):
        return str(part["refusal"])
    refuse(where, f"{where} must be a text, {{'type': 'text', 'text': ...}}; got type {shown(part.get('type'))}")


def _call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A call of an earlier answer. Templates want its arguments as an object."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        refuse(where, f"{where} needs a function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            refuse(f"{where}.function.arguments", f"{where}.function.arguments is not JSON")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}
