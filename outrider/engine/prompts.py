"""Prompts as people give them, as token ids."""

import inspect
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from outrider.core.types import InputError

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message] | Mapping[str, Any] | Int[np.ndarray, " n"] | Int[Tensor, " n"]
"""A text, a list of token ids (an array or a tensor too), a list of chat messages, or a mapping: `input_ids` as a
tokenizer returns them, or `messages` with other arguments of the chat template."""
Tool = Mapping[str, Any] | Callable[..., Any]
"""A tool that the assistant may call: its JSON schema, or a function with types and a docstring."""
WANTED = "a prompt is a text, a list of token ids or a list of chat messages"
NO_TOKENIZER = "there is no tokenizer beside the target; give prompts as lists of token ids"
BESIDE_MESSAGES = ("tools", "documents", "chat_template_kwargs")
"""What a chat template takes besides the messages."""
NOT_IDS = frozenset({"attention_mask", "token_type_ids", "special_tokens_mask", "offset_mapping", "length"})
"""What a tokenizer returns besides the token ids. Only the mask is read."""
OPENING = ("chat_template", "add_generation_prompt", "continue_final_message")
"""Arguments of `apply_chat_template` that `chat_template_kwargs` may give."""


def encode(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    tools: Sequence[Tool] | None = None,
    documents: Sequence[Mapping[str, str]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a prompt. Chat messages go through the tokenizer's template, the assistant to speak next; if the
    last message is the assistant's, the output continues it.

    Args:
        tools: Tools that the assistant may call, for the template.
        documents: Documents that the assistant may use, for the template.
        chat_template_kwargs: Other arguments of the template, such as `enable_thinking`.

    Raises:
        InputError: There is no tokenizer or no template for such a prompt, the template does not read what was given,
            or it is no text.
    """
    arguments = {"tools": tools, "documents": documents, "chat_template_kwargs": chat_template_kwargs}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    if isinstance(prompt, Mapping) and "messages" in prompt:
        for name in prompt.keys() - {"messages", *BESIDE_MESSAGES}:
            raise InputError(f"a prompt with messages may also hold {', '.join(BESIDE_MESSAGES)}; this holds {name!r}")
        of_prompt = {name: prompt[name] for name in BESIDE_MESSAGES if prompt.get(name) is not None}
        if both := sorted(arguments.keys() & of_prompt.keys()):
            raise InputError(f"{both[0]} is given with the messages and as an option; give it once")
        arguments, prompt = arguments | of_prompt, prompt["messages"]
        if not isinstance(prompt, Sequence) or isinstance(prompt, str) or not prompt:
            raise InputError(f"messages must be a list of chat messages, got {reprlib.repr(prompt)}")
    ids = _ids(prompt)
    if ids is None and not isinstance(prompt, str):
        return _chat(prompt, tokenizer, **arguments)
    if arguments:
        raise InputError(
            f"{min(arguments)} can be given with chat messages alone; this prompt is {reprlib.repr(prompt)}"
        )
    return encode_text(str(prompt), tokenizer) if ids is None else ids


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase | None, *, special: bool = True) -> list[int]:
    """Token ids of a text.

    Args:
        special: Whether the tokenizer adds its special tokens, such as the one that begins a text. That one is all of
            an empty text, even where the tokenizer does not add it to others.
    """
    if tokenizer is None:
        raise InputError(NO_TOKENIZER)
    if not text:
        begin = tokenizer.bos_token_id if special else None
        return [] if begin is None else [int(begin)]
    return list(tokenizer(_unicode(text), add_special_tokens=special)["input_ids"])


def reads(template: str, name: str) -> bool:
    """Whether a chat template reads an argument."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def _ids(prompt: Prompt) -> list[int] | None:
    """Token ids that a prompt holds; None where it is a text or a list of messages."""
    if isinstance(prompt, str):
        return None
    mask: list[int] | None = None
    if isinstance(prompt, Mapping):
        others = sorted(map(str, prompt.keys() - {"input_ids"} - NOT_IDS))
        if others or "input_ids" not in prompt:
            name = repr(others[0]) if others else "neither"
            raise InputError(
                f"a prompt that is a mapping holds messages, or input_ids of a tokenizer; this holds {name}"
            )
        mask = _one_row(prompt["attention_mask"]) if prompt.get("attention_mask") is not None else None
        prompt = _one_row(prompt["input_ids"])
    items = prompt.tolist() if isinstance(prompt, np.ndarray | Tensor) else prompt
    if not isinstance(items, Sequence) or isinstance(items, bytes | bytearray):
        raise InputError(f"{WANTED}, got {reprlib.repr(prompt)}")
    ids = [int(token) for token in items if isinstance(token, Integral)]
    foreign = [each for each in items if not isinstance(each, Integral if ids or mask is not None else Mapping)]
    if len(ids) < len(items) and foreign:
        raise InputError(f"{WANTED}; this list holds {reprlib.repr(foreign[0])}")
    if len(ids) < len(items):
        return None
    if mask is not None and len(mask) != len(ids):
        raise InputError(f"attention_mask has {len(mask)} marks for {len(ids)} tokens; give one per token")
    return ids if mask is None else [token for token, kept in zip(ids, mask, strict=True) if kept]


def rows(batch: Mapping[str, Any]) -> list[Prompt]:
    """The rows of a batch that a tokenizer returned, each as a prompt."""
    columns = {name: batch[name] for name in ("input_ids", "attention_mask") if batch.get(name) is not None}
    columns = {name: _list(value) for name, value in columns.items()}
    if not columns["input_ids"] or isinstance(columns["input_ids"][0], Integral):
        raise InputError("prompts must be a list; for one prompt give [prompt]; got input_ids of one prompt")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _one_row(value: Any) -> Any:
    """The only row of a batch; a row is returned unchanged."""
    rows = _list(value)
    if isinstance(rows, Sequence) and rows and not isinstance(rows[0], Integral):
        if len(rows) > 1:
            raise InputError(f"a prompt is one row of token ids, got {len(rows)} rows; give each as a prompt")
        return rows[0]
    return rows


def _list(value: Any) -> Any:
    """A tensor or an array as lists."""
    return value.tolist() if isinstance(value, np.ndarray | Tensor) else value


def _chat(
    conversation: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    tools: Any = None,
    documents: Any = None,
    chat_template_kwargs: Any = None,
) -> list[int]:
    """Token ids of chat messages."""
    if tokenizer is None:
        raise InputError(NO_TOKENIZER)
    messages = [_message(each) for each in conversation]
    more = _template_arguments(tokenizer, tools, documents, chat_template_kwargs)
    if "add_generation_prompt" not in more and "continue_final_message" not in more:
        continues = messages[-1]["role"] == "assistant"
        if continues and not messages[-1].get("content"):
            raise InputError(
                "the last message is the assistant's and holds no text to continue; leave it out, or add the message "
                "that answers it"
            )
        more |= {"add_generation_prompt": not continues, "continue_final_message": continues}
    try:
        chat: list[int] = tokenizer.apply_chat_template(messages, return_dict=False, **more)
    except Exception as error:
        raise InputError(f"the chat template makes no prompt of these messages: {error}") from error
    return chat


def _template_arguments(
    tokenizer: PreTrainedTokenizerBase,
    tools: Any,
    documents: Any,
    others: Any,
) -> dict[str, Any]:
    """Arguments of `apply_chat_template`. Raises InputError for those that the template does not read: transformers
    would drop them without a word.
    """
    for name, each in (("tools", tools), ("documents", documents)):
        listed = isinstance(each, Sequence) and not isinstance(each, str)
        if each is not None and not (
            listed and all(isinstance(e, Mapping) or (name == "tools" and callable(e)) for e in each)
        ):
            raise InputError(f"{name} must be a list of JSON objects, got {reprlib.repr(each)}")
    if others is not None and not isinstance(others, Mapping):
        raise InputError(f"chat_template_kwargs must be a JSON object, got {reprlib.repr(others)}")
    reserved = set(inspect.signature(tokenizer.apply_chat_template).parameters) - {*OPENING, "kwargs"}
    if taken := sorted(reserved.intersection(others or ())):
        raise InputError(f"chat_template_kwargs holds {taken[0]!r}, which is no argument of a template; leave it out")
    arguments = {"tools": tools, "documents": documents}
    arguments = {name: list(value) for name, value in arguments.items() if value} | dict(others or {})
    if tokenizer.chat_template is None and "chat_template" not in arguments:
        raise InputError("the target's tokenizer has no chat template; give the prompt as a string")
    template = str(arguments.get("chat_template") or tokenizer.get_chat_template(tools=arguments.get("tools")))
    for name in arguments:
        if name not in OPENING and not reads(template, str(name)):
            raise InputError(f"the target's chat template does not read {name}; leave it out, or give another template")
    return arguments


def _message(entry: object) -> dict[str, Any]:
    """A chat message. Raises InputError where it has no role or says nothing: a template would leave a gap there."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("role"), str):
        raise InputError(f"a chat message needs a role, such as 'user', got {entry!r}")
    if entry.get("content") is None and not entry.get("tool_calls"):
        raise InputError(f"a chat message needs content, got {entry!r}")
    message = {key: _unicode(value) if isinstance(value, str) else value for key, value in entry.items()}
    if not isinstance(message.get("content"), str | None):
        message["content"] = _unicode(_joined(message["content"]))
    return message


def _joined(parts: object) -> str:
    """The text of a message's parts, such as `[{"type": "text", "text": "Hello"}]`. Raises InputError for others."""
    if not isinstance(parts, Sequence):
        raise InputError(f"the content of a chat message is a text or a list of parts, got {reprlib.repr(parts)}")
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InputError(f"a part of a chat message must be a text, {{'type': 'text', 'text': ...}}, got {part!r}")
    return "".join(part["text"] for part in parts)


def _unicode(text: str) -> str:
    """The text, unless half of a character stands in it, as where bytes were read that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"the prompt is not Unicode text: half of a character stands at {error.start}") from error
    return text
