"""Chat messages of a request as token ids, by the tokenizer's chat template."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from outrider.engine.prompts import OPENING, Message, encode, reads

log = logging.getLogger("outrider.serve")


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """What a chat template makes a prompt of.

    Attributes:
        tools: Tools that the model may call.
        arguments: Other arguments of the template. Those that it does not read change nothing and are left out.
        generation_prompt: Open the assistant's answer.
        continue_final: Leave the last message open, so that the output continues it.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, str]] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    generation_prompt: bool = True
    continue_final: bool = False


def encode_chat(tokenizer: PreTrainedTokenizerBase, prompt: ChatPrompt) -> list[int]:
    """Token ids of chat messages.

    Raises:
        InputError: There is no template, it does not read the tools or the documents, or it makes no prompt.
    """
    arguments, tools = dict(prompt.arguments), prompt.tools
    if tokenizer.chat_template is not None:
        template = str(arguments.get("chat_template") or tokenizer.get_chat_template(tools=list(tools or ()) or None))
        for name in [name for name in arguments if name not in OPENING and not reads(template, name)]:
            log.debug("the chat template does not read %s", name)
            del arguments[name]
    arguments |= {"add_generation_prompt": prompt.generation_prompt, "continue_final_message": prompt.continue_final}
    return encode(
        {"messages": list(prompt.messages)},
        tokenizer,
        tools=tools,
        documents=prompt.documents,
        chat_template_kwargs=arguments,
    )
