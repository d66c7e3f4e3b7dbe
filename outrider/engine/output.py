"""What the engine hands out: what each step brought to a request, and what the request gave."""

from dataclasses import dataclass, field
from typing import Literal

from outrider.types import Step

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, kw_only=True)
class Output:
    """What a request gave.

    Attributes:
        prompt_tokens: How long the prompt was.
        reused_tokens: How many of its tokens were not digested again, because the prompt of another request began so.
        text: The output's text, without special tokens, ending before a stop string.
        tokens: The output's token ids, an ending token included.
        finish_reason: `stop` (an end token or stop string), `length`, `cancelled` or `error`.
        accepted_per_position: How often the draft token at depth 1, 2, ... was accepted.
        seconds: From the request's admission to its last token.
        logprobs: Log-softmax of the raw target logits at each token, if asked for.
        top_logprobs: The same of the likeliest tokens at each place, by their ids, if asked for.
        steps: Every step, if the caller kept them.
        error: What ended the request, where `finish_reason` is `error`. It holds on to its traceback.
    """

    id: str
    prompt_tokens: int
    text: str
    tokens: list[int]
    finish_reason: FinishReason
    num_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_position: list[int]
    block_efficiency: float
    seconds: float
    reused_tokens: int = 0
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    steps: list[Step] = field(default_factory=list, repr=False)
    error: Exception | None = None

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, kw_only=True)
class Update:
    """What one engine step brought to one request.

    Attributes:
        tokens: New tokens.
        text: New text that is certain.
        output: What the request gave, once it has ended.
        step: The step that brought them; None where the request ended without one.
    """

    id: str
    tokens: list[int]
    text: str
    output: Output | None = None
    step: Step | None = field(default=None, repr=False)


def succeeded(update: Update) -> Update:
    """The update, unless an error ended its request: that is raised."""
    if update.output is not None and update.output.error is not None:
        raise update.output.error
    return update
