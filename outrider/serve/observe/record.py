"""What is known of a request when it has ended, for the log and for its span."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.core.types import Step
from outrider.engine.generation import Generation
from outrider.engine.output import Times


@dataclass(kw_only=True)
class OutputTally:
    """The steps of one output; changes in place.

    Attributes:
        drafted: Draft tokens of each step; of a tree its nodes.
        accepted: Accepted ones of each step.
        emitted: Number of tokens that the steps emitted.
    """

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    emitted: int = 0
    drafter_seconds: float = 0.0
    target_seconds: float = 0.0

    def add(self, step: Step) -> None:
        """Count a step."""
        self.drafted.append(step.num_draft_tokens)
        self.accepted.append(step.num_accepted_tokens)
        self.emitted += len(step.tokens)
        self.drafter_seconds += step.timing.drafter
        self.target_seconds += step.timing.target


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """A request that has ended.

    Attributes:
        id: Its name.
        path: The path of its route.
        model: The model's name.
        verifier: The verifier's name.
        options: What was asked of each output.
        num_outputs: Outputs of each prompt.
        finish_reasons: Why each output ended.
        times: Of each output that was queued.
        tallies: The steps of each output.
        seconds: What it took.
        error: The code of the error that ended it; None if none did.
        prompts: Its prompts as texts, where they are wanted.
        texts: Its outputs, likewise; None for one that did not end.
    """

    id: str
    path: str
    model: str
    verifier: str
    options: Generation
    num_outputs: int
    prompt_tokens: int
    completion_tokens: int
    finish_reasons: Sequence[str]
    times: Sequence[Times]
    tallies: Sequence[OutputTally]
    seconds: float
    error: str | None = None
    prompts: Sequence[str] = ()
    texts: Sequence[str | None] = ()

    def log_fields(self, *, with_text: bool) -> dict[str, Any]:
        """The fields of the request's line in the log."""
        fields: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "finish_reasons": list(self.finish_reasons),
        }
        if self.error is not None:
            fields["error"] = self.error
        return fields | {"prompts": list(self.prompts), "outputs": list(self.texts)} if with_text else fields
