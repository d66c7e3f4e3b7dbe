"""The results of the engine: an `Update` per step of a request, an `Output` when it has ended."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Literal

from transformers import PreTrainedTokenizerBase

from outrider.core.types import Step
from outrider.engine.kinds import kinds
from outrider.engine.text import TextStream

FinishReason = Literal["stop", "length", "cancelled", "error"]
STYLES = {
    "accepted": "background:#cdebd6;color:#1c1c1e",
    "recovered": "background:#f9d9c9;color:#1c1c1e;text-decoration:underline dotted",
    "bonus": "background:#d6def8;color:#1c1c1e;text-decoration:underline",
}
"""How a notebook shows tokens by their kind, in the colours of the server's page."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """When things happened to a request, in seconds of `time.monotonic`; None until they happen.

    Attributes:
        queued: The request came.
        admitted: It got its slot.
        first: Its first token came.
        last: Its newest token came.
    """

    queued: float
    admitted: float | None = None
    first: float | None = None
    last: float | None = None


@dataclass(frozen=True, kw_only=True)
class PromptLogprobs:
    """What the target makes of a prompt: log-softmax of its raw logits, before any setting of a request.

    Attributes:
        token_logprobs: Of each token of the prompt after those before it; None for the first.
        top: Of the likeliest tokens at each place, by token id; None for the first token. Empty where none were asked
            for.
    """

    token_logprobs: list[float | None]
    top: list[Mapping[int, float] | None]


@dataclass(frozen=True, kw_only=True)
class Output:
    """The result of one request.

    Attributes:
        prompt_tokens: Number of prompt tokens.
        reused_tokens: Prompt tokens that needed no prefill, because the text of another request begins with them.
        text: The output as text, without special tokens; it ends before a stop string.
        tokens: The output's token ids, an end token included.
        finish_reason: `stop` (an end token or stop string), `length`, `cancelled` or `error`.
        context_full: Whether `finish_reason` is `length` because the context was full, before `max_new_tokens`.
        stop_reason: The stop string or the end token that ended the output, if `finish_reason` is `stop`.
        accepted_per_position: How often the draft token at depth 1, 2, ... was accepted.
        seconds: Time from the request's admission to its last token.
        times: When the request came, got its slot and emitted tokens.
        logprobs: Log-softmax of the raw target logits at each token, if asked for.
        top_logprobs: The same for the likeliest tokens at each position, by token id, if asked for.
        prompt_logprobs: What the target makes of the prompt, if asked for.
        accepted_prediction_tokens: Draft tokens that the drafter copied from the request's prediction, accepted ones.
        rejected_prediction_tokens: The same, rejected ones.
        steps: Every step; `generate` fills it in.
        tokenizer: What gives each token its text in a notebook; `generate` fills it in.
        error: The exception that ended the request, if `finish_reason` is `error`. It keeps its traceback alive.
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
    prompt_logprobs: PromptLogprobs | None = None
    context_full: bool = False
    stop_reason: str | int | None = None
    times: Times | None = None
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    steps: list[Step] = field(default_factory=list, repr=False)
    tokenizer: PreTrainedTokenizerBase | None = field(default=None, repr=False, compare=False)
    error: Exception | None = None

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds if self.seconds else 0.0

    def _repr_html_(self) -> str:
        """What a notebook shows: the text with its tokens coloured by where they come from, and what drafts were worth.

        Without steps, as from `stream`, the text has no colours.
        """
        shown = "<span>" + escape(self.text) + "</span>"
        if self.tokenizer is not None and self.steps:
            stream, of_tokens = TextStream(self.tokenizer), (kind for step in self.steps for kind in kinds(step))
            pieces = [(stream.push(token), kind) for token, kind in zip(self.tokens, of_tokens, strict=False)]
            pieces.append((stream.finish(), "plain"))
            shown = "".join(
                f'<span title="{kind}" style="{STYLES.get(kind, "")}">{escape(piece)}</span>' for piece, kind in pieces
            )
        legend = " ".join(f'<span style="{style}">{kind}</span>' for kind, style in STYLES.items())
        drafts = f"{self.num_accepted_tokens} of {self.num_draft_tokens} draft tokens accepted"
        return (
            f'<div style="white-space:pre-wrap">{shown}</div><div><small>{len(self.tokens)} tokens in {self.num_steps} '
            f"steps: block efficiency {self.block_efficiency:.2f}, {drafts}; {legend}</small></div>"
        )


@dataclass(frozen=True, kw_only=True)
class Update:
    """The new tokens of one request after one engine step.

    Attributes:
        tokens: New tokens.
        text: New text that no later token can change.
        output: The request's result, in its last update; None before.
        step: The step that emitted the tokens; None if the request ended without a step.
        times: When the request came, got its slot and emitted tokens, up to now.
    """

    id: str
    tokens: list[int]
    text: str
    output: Output | None = None
    step: Step | None = field(default=None, repr=False)
    times: Times | None = None


def succeeded(update: Update) -> Update:
    """Return the update. If an error ended its request, raise that error."""
    if update.output is not None and update.output.error is not None:
        raise update.output.error
    return update
