"""Prompts as people give them, as token ids."""

import reprlib
from collections.abc import Mapping, Sequence
from numbers import Integral

import numpy as np
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from outrider.core.types import InputError

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]] | Int[np.ndarray, " n"] | Int[Tensor, " n"]
"""A text, a list of token ids (an array or a tensor too), or a list of chat messages."""
WANTED = "a prompt is a text, a list of token ids or a list of chat messages"
NO_TOKENIZER = "there is no tokenizer beside the target; give prompts as lists of token ids"


def encode(prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """Token ids of a prompt; chat messages go through the tokenizer's template, the assistant to speak next.

    Raises:
        InputError: There is no tokenizer or no template for such a prompt, or it is no text.
    """
    if isinstance(prompt, str):
        return _encoded(prompt, tokenizer)
    given = prompt.tolist() if isinstance(prompt, np.ndarray | Tensor) else prompt
    if not isinstance(given, Sequence) or isinstance(given, bytes | bytearray):
        raise InputError(f"{WANTED}, got {reprlib.repr(prompt)}")
    ids = [int(token) for token in given if isinstance(token, Integral)]
    if len(ids) == len(given):
        return ids
    foreign = [each for each in given if not isinstance(each, Integral if ids else Mapping)]
    if foreign:
        raise InputError(f"{WANTED}; this list holds {reprlib.repr(foreign[0])}")
    if tokenizer is None:
        raise InputError(NO_TOKENIZER)
    messages = [_message(each) for each in given if isinstance(each, Mapping)]
    if tokenizer.chat_template is None:
        raise InputError("the target's tokenizer has no chat template; give the prompt as a string")
    try:
        chat: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    except Exception as error:
        raise InputError(f"the chat template makes no prompt of these messages: {error}") from error
    return chat


def _encoded(text: str, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """Token ids of a text."""
    if tokenizer is None:
        raise InputError(NO_TOKENIZER)
    return list(tokenizer(_unicode(text))["input_ids"]) if text else []


def _message(given: Mapping[str, object]) -> dict[str, object]:
    """A chat message. Raises InputError where it has no role or says nothing: a template would leave a gap there."""
    if not isinstance(given.get("role"), str):
        raise InputError(f"a chat message needs a role, such as 'user', got {given!r}")
    if given.get("content") is None and not given.get("tool_calls"):
        raise InputError(f"a chat message needs content, got {given!r}")
    return {key: _unicode(said) if isinstance(said, str) else said for key, said in given.items()}


def _unicode(text: str) -> str:
    """The text, unless half of a character stands in it, as where bytes were read that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"the prompt is not Unicode text: half of a character stands at {error.start}") from error
    return text
