"""A request inside the engine: its progress and its results so far."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from outrider.core.types import Request, Running, Step
from outrider.decoding.drafting import drafter_of
from outrider.decoding.reading import LogProbs
from outrider.engine.output import FinishReason, Output, PromptLogprobs, Times
from outrider.engine.text import Ending


@dataclass(kw_only=True, eq=False)
class Seat:
    """A request in the engine; changes in place.

    Attributes:
        ready: Whether its prompt is prefilled, or its first step will prefill the rest.
        suspect: Whether its last step failed together with other requests; it makes its next step alone.
        reused: Prompt tokens that needed no prefill.
        times: When the request came, got its slot and emitted tokens.
        prompt: Log-probabilities of the prompt so far, the first token's left out.
    """

    request: Request
    ending: Ending
    running: Running | None = None
    times: Times = field(default_factory=lambda: Times(queued=time.monotonic()))
    ready: bool = False
    suspect: bool = False
    reused: int = 0
    num_draft_tokens: int = 0
    accepted: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[Mapping[int, float]] = field(default_factory=list)
    prompt: PromptLogprobs = field(default_factory=lambda: PromptLogprobs(token_logprobs=[None], top=[None]))
    ended: bool = False

    @property
    def state(self) -> Running:
        """The request as the loop sees it. Raises RuntimeError if it has no slot yet."""
        if self.running is None:
            raise RuntimeError(f"request {self.request.id} has no slot yet")
        return self.running

    def keep(self, tokens: Sequence[int]) -> int:
        """How many of the new tokens belong to the output, by the request's `ends` and its stop strings."""
        if self.request.ends is not None:
            output = self.state.output
            for i, token in enumerate(tokens, 1):
                output.append(token)
                if self.request.ends(output):
                    self.ended, tokens = True, tokens[:i]
                    break
        return self.ending.keep(tokens)

    def note(self, step: Step) -> None:
        """Count a step."""
        self.suspect = False
        self.num_draft_tokens += step.num_draft_tokens
        self.accepted.append(step.num_accepted_tokens)
        self.logprobs += step.logprobs or ()
        self.top_logprobs += step.top_logprobs or ()
        now, first = time.monotonic(), self.times.first
        self.times = replace(self.times, first=now if first is None else first, last=now)

    def note_prompt(self, start: int, scores: LogProbs) -> None:
        """Note the log-probabilities of the prompt's tokens behind a prefilled chunk.

        Args:
            start: Number of the chunk's first token in the prompt.
        """
        logprobs, top = self.prompt.token_logprobs, self.prompt.top
        # A chunk that was prefilled before an undone step comes again.
        del logprobs[start + 1 :], top[start + 1 :]
        chosen = scores.chosen or ()
        logprobs += chosen
        top += scores.top or [{} for _ in chosen]
        # After a step was undone, output tokens are prefilled too.
        del logprobs[len(self.request.prompt) :], top[len(self.request.prompt) :]

    def start_over(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """After a step was undone: rebuild the text from the committed tokens; none of it is handed out again."""
        self.ready, self.suspect, self.ended = False, True, False
        self.ending = ending_of(self.request, tokenizer)
        self.ending.keep(self.state.output)
        self.ending.take()

    def output(self, reason: FinishReason, error: Exception | None = None) -> Output:
        """The result of the request."""
        tokens = [] if self.running is None else self.running.output
        running = self.running
        predicted = (0, 0) if running is None else drafter_of(running).predicted(running.drafter_state)
        deepest, wanted = max(self.accepted, default=0), self.request.logprobs
        return Output(
            id=self.request.id,
            prompt_tokens=len(self.request.prompt),
            reused_tokens=self.reused,
            text=self.ending.text,
            tokens=tokens,
            finish_reason=reason,
            num_steps=len(self.accepted),
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=sum(self.accepted),
            accepted_per_position=[sum(count > i for count in self.accepted) for i in range(deepest)],
            block_efficiency=len(tokens) / max(1, len(self.accepted)),
            seconds=time.monotonic() - self.times.admitted if self.times.admitted is not None else 0.0,
            logprobs=self.logprobs if wanted is not None else None,
            top_logprobs=[dict(each) for each in self.top_logprobs] if wanted else None,
            prompt_logprobs=self.prompt if self.request.prompt_logprobs is not None else None,
            context_full=reason == "length" and len(tokens) < self.request.max_new_tokens,
            stop_reason=self._stop_reason if reason == "stop" else None,
            times=self.times,
            accepted_prediction_tokens=predicted[0],
            rejected_prediction_tokens=predicted[1],
            error=error,
        )

    @property
    def _stop_reason(self) -> str | int | None:
        """The stop string or the end token that ended the output; None if `ends` did."""
        if self.ending.stopped_by is not None:
            return self.ending.stopped_by
        newest = self.state.tokens[-1]
        return newest if newest in self.request.eos_ids else None


def ending_of(request: Request, tokenizer: PreTrainedTokenizerBase | None) -> Ending:
    """How the text of a request grows and ends."""
    return Ending(
        tokenizer,
        request.stop,
        include_stop=request.include_stop,
        end_tokens=request.eos_ids,
        min_tokens=request.min_tokens,
    )
