"""Chat messages of a request as token ids, by the tokenizer's chat template."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from outrider.engine.prompts import OPENING, Message, encode, reads

log = logging.getLogger("outrider.serve")


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    documents: Sequence[Mapping[str, str]] | None,
    kwargs: Mapping[str, Any] | None,
    generation_prompt: bool,
    continue_final: bool,
) -> list[int]:
    """Token ids of chat messages.

    Args:
        kwargs: Other arguments of the template. Those that it does not read change nothing and are left out.
        generation_prompt: Open the assistant's answer.
        continue_final: Leave the last message open, so that the output continues it.

    Raises:
        InputError: There is no template, it does not read the tools or the documents, or it makes no prompt.
    """
    given = dict(kwargs or {})
    if tokenizer.chat_template is not None:
        template = str(given.get("chat_template") or tokenizer.get_chat_template(tools=list(tools or ()) or None))
        for name in [name for name in given if name not in OPENING and not reads(template, name)]:
            log.debug("the chat template does not read %s", name)
            del given[name]
    given |= {"add_generation_prompt": generation_prompt, "continue_final_message": continue_final}
    return encode({"messages": list(messages)}, tokenizer, tools=tools, documents=documents, chat_template_kwargs=given)
