"""A conversation of a workload: its opening, and what the user says after each answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.core.conversations import RecordShape
from outrider.engine.prompts import Prompt

Message = Mapping[str, Any]
"""A chat message with role and content."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One line of a workload.

    Attributes:
        id: Unique within the workload.
        category: What kind of request it is; speedups are told for each.
        shape: What its record was taken for; None: a prompt, without doubt.
        opening: The first prompt: a text to continue, token ids, or chat messages.
        replies: Messages behind the first answer, behind the second, ... Each answer is the model's own.
        output_tokens: Tokens of each answer; None takes the number that the run asks for.
        arrives: Seconds from the beginning of a trace to the request; None where the workload has no times.
    """

    id: str
    category: str
    opening: Prompt
    shape: RecordShape | None = None
    replies: tuple[tuple[Message, ...], ...] = ()
    output_tokens: int | None = None
    arrives: float | None = None

    @property
    def name(self) -> str:
        """The same as its id, as what takes turns is asked for it."""
        return self.id

    @property
    def num_turns(self) -> int:
        """How many answers it asks for."""
        return 1 + len(self.replies)

    def messages(self, answers: Sequence[str]) -> list[Message]:
        """All messages up to the next answer, where the opening is chat messages.

        Args:
            answers: What the model has said so far.
        """
        messages: list[Message] = list(self.opening)  # type: ignore[arg-type]
        for answer, reply in zip(answers, self.replies, strict=False):
            messages += [{"role": "assistant", "content": answer}, *reply]
        return messages

    @property
    def is_chat(self) -> bool:
        """Whether the opening is chat messages."""
        return isinstance(self.opening, Sequence) and bool(self.opening) and isinstance(self.opening[0], Mapping)
