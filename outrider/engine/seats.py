"""Requests inside the engine: how far each is, and what there is to digest of its prompt."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.engine.output import FinishReason, Output
from outrider.engine.text import Ending
from outrider.types import Request, Running


@dataclass(kw_only=True)
class Seat:
    """A request in the engine; changes in place.

    Attributes:
        ready: Whether its prompt is digested, or will be by its first step.
        suspect: Whether it stood in a step that failed and has made none since; it makes the next one alone.
    """

    request: Request
    ending: Ending
    running: Running | None = None
    admitted: float = 0.0
    ready: bool = False
    suspect: bool = False
    num_draft_tokens: int = 0
    accepted: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False

    @property
    def state(self) -> Running:
        """The request as the loop sees it. Raises RuntimeError where it has no slot yet."""
        if self.running is None:
            raise RuntimeError(f"request {self.request.id} has no slot yet")
        return self.running

    def keep(self, tokens: Sequence[int]) -> int:
        """How many of the new tokens belong to the output: what the request's own rule and its stop strings leave."""
        if self.request.ends is not None:
            output = self.state.output
            for i, token in enumerate(tokens, 1):
                output.append(token)
                if self.request.ends(output):
                    self.ended, tokens = True, tokens[:i]
                    break
        return self.ending.keep(tokens)

    def output(self, reason: FinishReason, error: Exception | None = None) -> Output:
        """What the request gave."""
        tokens = [] if self.running is None else self.running.output
        deepest = max(self.accepted, default=0)
        return Output(
            id=self.request.id,
            prompt_tokens=len(self.request.prompt),
            text=self.ending.text,
            tokens=tokens,
            finish_reason=reason,
            num_steps=len(self.accepted),
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=sum(self.accepted),
            accepted_per_position=[sum(count > i for count in self.accepted) for i in range(deepest)],
            block_efficiency=len(tokens) / max(1, len(self.accepted)),
            seconds=time.perf_counter() - self.admitted if self.running is not None else 0.0,
            logprobs=self.logprobs if self.request.logprobs else None,
            error=error,
        )


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A part of a prompt to digest.

    Attributes:
        count: How many tokens.
        end: How many are digested then.
        last: Whether nothing but the newest token is left then.
    """

    seat: Seat
    count: int
    end: int
    last: bool

    def like(self, longest: "Chunk") -> bool:
        """Whether a forward over both pads little, in new tokens and in those behind which they stand."""
        new, all_ = longest.count - self.count, abs(longest.end - self.end)
        return new <= max(16, longest.count // 4) and all_ <= max(64, longest.end // 4)


def alike(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Chunks that can share a forward without much padding; those of suspects stay alone."""
    groups: list[list[Chunk]] = []
    for chunk in sorted(chunks, key=lambda chunk: (chunk.seat.suspect, -chunk.count)):
        if groups and not chunk.seat.suspect and chunk.like(groups[-1][0]):
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
    return groups
