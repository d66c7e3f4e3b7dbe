"""The token ids of a conversation's prompts, and which conversations of a workload are asked."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from outrider.bench.workloads.choice import choose
from outrider.bench.workloads.conversation import Conversation
from outrider.bench.workloads.workload import Workload
from outrider.core.inputs import InputError
from outrider.engine.prompts import Prompt, encode

BETWEEN = "\n\n"
"""What stands between messages where the target has no chat template."""


class Encoder:
    """Prompts as token ids.

    Chat messages go through the target's chat template. Where it has none, they are sent as a text, with an empty line
    between them. Token ids of a trace are taken modulo the vocabulary.

    Args:
        vocab_size: Size of the target's vocabulary.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self.template: str | None = getattr(tokenizer, "chat_template", None)

    def prompt(self, conversation: Conversation, answers: Sequence[str] = ()) -> list[int]:
        """The prompt of the next answer.

        Args:
            answers: What the model has said so far in this conversation.
        """
        prompt: Prompt = conversation.opening
        if conversation.is_chat:
            messages = conversation.messages(answers)
            prompt = messages if self.template else BETWEEN.join(str(each["content"]) for each in messages)
        elif isinstance(prompt, tuple):
            prompt = [token % self._vocab_size for token in prompt]
        return encode(prompt, self._tokenizer)

    def longest(self, conversation: Conversation, max_new_tokens: int) -> int:
        """About how many tokens the last prompt of a conversation and its answer have at most.

        Args:
            max_new_tokens: Most tokens of an answer whose conversation names no number.
        """
        # Some chat templates refuse an empty answer.
        last = self.prompt(conversation, ["a"] * (conversation.num_turns - 1))
        return len(last) + conversation.num_turns * (conversation.output_tokens or max_new_tokens)


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """The conversations of a measurement.

    Attributes:
        left_out: How many do not fit into the context.
        token_ids: SHA-256 of the token ids of all first prompts.
        template: SHA-256 of the chat template; None where there is none.
    """

    conversations: tuple[Conversation, ...]
    left_out: int
    token_ids: str
    template: str | None


def ask(workload: Workload, encoder: Encoder, *, count: int | None, room: int, seed: int = 0) -> PromptSet:
    """Choose conversations, as many of every category as of any other.

    Args:
        count: How many; None takes all. A trace keeps its order.
        room: Most tokens of a first prompt and its answer.

    Raises:
        InputError: None fits.
    """
    fitting, prompts = [], {}
    for each in workload.conversations:
        prompt = encoder.prompt(each)
        if prompt and len(prompt) + (each.output_tokens or 0) <= room:
            fitting.append(each)
            prompts[each.id] = prompt
    if not fitting:
        raise InputError(
            f"no prompt of {workload.name} fits: with its answer it may have at most {room} tokens; lower "
            "--max-new-tokens, or give shorter prompts"
        )
    chosen = fitting
    if count is not None and count < len(fitting):
        chosen = fitting[:count] if workload.has_times else choose(fitting, count, seed)
    ids = repr([(each.id, prompts[each.id]) for each in chosen])
    return PromptSet(
        conversations=tuple(chosen),
        left_out=len(workload.conversations) - len(fitting),
        token_ids=hashlib.sha256(ids.encode()).hexdigest(),
        template=None if encoder.template is None else hashlib.sha256(str(encoder.template).encode()).hexdigest(),
    )
