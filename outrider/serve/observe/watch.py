"""The numbers of a server, for its metrics. One thread writes each number, without a lock; any thread may read."""

import bisect
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from outrider.core.types import Step
from outrider.engine.output import Output, Times, Update

_SHORT = (0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LONG = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TO_FIRST = (*_LONG, 160, 640, 2560)
"""Bounds, in seconds, of the time to the first token; like all bounds here those of vLLM."""
BETWEEN = (0.001, 0.0025, 0.005, 0.01, *_SHORT)
"""Bounds, in seconds, of the time between tokens, with shorter ones for small models."""
WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
"""Bounds, in seconds, of what a whole request takes."""
ITERATION = (1, 8, *(2**i for i in range(4, 15)))
"""Bounds of the tokens of one step."""
OUTPUTS = (1, 2, 5, 10, 20)
"""Bounds of the outputs of one prompt."""
KINDS = ("plain", "draft", "prefill")
"""Kinds of steps: without drafts, with drafts, and the prefill of prompts beside them."""
PARTS = ("target", "drafter", "rows", "verify", "commit", "replay", "rest")
"""Parts of a step's time."""
REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
"""Why outputs end, in the engine's words and in vLLM's."""
MEMORY = 0.02
"""Weight of the newest value in moving averages."""


class Histogram:
    """Counts of values by upper bounds, as Prometheus has them. Changes in place.

    Attributes:
        bounds: Upper bounds, ascending; a value that equals a bound lies below it.
        counts: How many values lie between the bounds; the last count is of those above all bounds.
        sum: Sum of the values.

    Example:
        >>> sizes = Histogram((1, 10))
        >>> for size in (1, 5, 50):
        ...     sizes.note(size)
        >>> sizes.counts, sizes.sum
        ([1, 1, 1], 56.0)
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def note(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)


def token_bounds(most: int) -> tuple[int, ...]:
    """The bounds 1, 2, 5, 10, 20, 50 ... up to a number of tokens.

    Example:
        >>> token_bounds(30)
        (1, 2, 5, 10, 20)
    """
    return tuple(digit * 10**power for power in range(12) for digit in (1, 2, 5) if digit * 10**power <= most)


class ServerStats:
    """What a server has done so far. Changes in place.

    Attributes:
        depth: Deepest draft that the length policy allows.
        num_steps: Number of pairs of a request and a step.
        num_drafts: Those pairs in which the request drafted.
        num_draft_tokens: Draft tokens; in trees all nodes.
        num_accepted_tokens: Accepted draft tokens.
        accepted_per_position: How often the draft token at depth 1, 2, ... was accepted.
        conditional: Of steps that drafted so deep and accepted all tokens before, the share that accepted the token at
            depth 1, 2, ...: a moving average. None before the first.
        lengths: Number of pairs of a request and a step, by draft tokens.
        prompt_tokens: Prompt tokens of requests whose first token came, or that ended without one.
        cached_tokens: Prompt tokens of ended requests that needed no prefill.
        generation_tokens: Output tokens.
        cancelled_tokens: Output tokens of cancelled requests.
        finished: Ended outputs, by vLLM's reasons `stop`, `length`, `abort` and `error`.
        timeouts: Requests whose deadline passed.
        rejections: Refused requests, by the reason's code.
        time_to_first_token: Seconds from a request's arrival to its first token.
        inter_token_latency: Seconds between two updates of a request.
        time_per_output_token: Seconds between tokens, on average over a request.
        e2e_latency: Seconds from a request's arrival to its end.
        queue_time: Seconds that a request waited for its slot.
        inference_time: Seconds from its slot to its end.
        prefill_time: Seconds from its slot to its first token.
        decode_time: Seconds from its first token to its last.
        request_prompt_tokens: Prompt tokens of ended requests.
        request_generation_tokens: Output tokens of ended requests.
        request_max_tokens: Most tokens that requests asked for.
        request_n: Outputs per request.
        iteration_tokens: Prompt and output tokens of a step.
        steps: Steps of the engine, by kind.
        step_seconds: What they took, by kind and by the number of requests, rounded up to a power of two.
        part_seconds: Seconds of all steps, by part.
        grammar_seconds: What the compilation of a grammar took.
        cache_use: Share of the cache that holds tokens, those of ended requests included, 0 .. 1.

    Args:
        max_context: Longest context in tokens.
        depth: Deepest draft that the length policy allows.
    """

    def __init__(self, *, max_context: int, depth: int) -> None:
        self.depth = depth
        self.num_steps = self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self.accepted_per_position = [0] * depth
        self.conditional: list[float | None] = [None] * depth
        self.lengths: Counter[int] = Counter()
        self.prompt_tokens = self.cached_tokens = self.generation_tokens = self.cancelled_tokens = 0
        self.finished: Counter[str] = Counter(dict.fromkeys(REASONS.values(), 0))
        self.timeouts = 0
        self.rejections: Counter[str] = Counter()
        self.time_to_first_token = Histogram(TO_FIRST)
        self.inter_token_latency = Histogram(BETWEEN)
        self.time_per_output_token = Histogram(BETWEEN)
        self.e2e_latency = Histogram(WHOLE)
        self.queue_time = Histogram(WHOLE)
        self.inference_time = Histogram(WHOLE)
        self.prefill_time = Histogram(WHOLE)
        self.decode_time = Histogram(WHOLE)
        self.request_prompt_tokens = Histogram(token_bounds(max_context))
        self.request_generation_tokens = Histogram(token_bounds(max_context))
        self.request_max_tokens = Histogram(token_bounds(max_context))
        self.request_n = Histogram(OUTPUTS)
        self.iteration_tokens = Histogram(ITERATION)
        self.steps: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
        self.step_seconds: dict[tuple[str, int], Histogram] = {}
        self.part_seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self.grammar_seconds = Histogram(BETWEEN)
        self.cache_use = 0.0
        self._latency: float | None = None
        self._updated: dict[str, float] = {}

    def wait(self, waiting: int, slots: int) -> float:
        """Seconds until a request that comes now might get a slot, 1 .. 60, by what requests took so far.

        Args:
            waiting: Number of requests that wait already.
            slots: Number of requests that run at once.
        """
        usual = 1.0 if self._latency is None else self._latency
        return min(60.0, max(1.0, usual * (waiting + 1) / slots))

    def note_updates(self, updates: Sequence[Update], seconds: float, prompts: Mapping[str, int]) -> None:
        """Note what a step of the engine brought, and what it took.

        Args:
            prompts: Number of prompt tokens of each running request.
        """
        made = [update.step for update in updates if update.step is not None]
        emitted = sum([len(update.tokens) for update in updates])
        read = 0
        now = time.monotonic()
        for update in updates:
            if update.step is not None:
                self._note_step(update.step)
            times, id = update.times, update.id
            if times is not None and update.tokens:
                before = self._updated.get(id)
                if before is not None:
                    self.inter_token_latency.note(now - before)
                elif times.first is not None:
                    self.time_to_first_token.note(times.first - times.queued)
                    read += prompts.get(id, 0)
                self._updated[id] = now
        self.generation_tokens += emitted
        self.prompt_tokens += read
        if emitted:
            self.iteration_tokens.note(emitted + read)
        for update in updates:
            if update.output is not None:
                self.note_end(update.output)
        self._note_iteration(made, seconds)

    def note_end(self, output: Output) -> None:
        """Note an ended output."""
        counted = self._updated.pop(output.id, None) is not None
        reason = REASONS[output.finish_reason]
        self.finished[reason] += 1
        if reason == "abort":
            self.cancelled_tokens += len(output.tokens)
        self.request_prompt_tokens.note(output.prompt_tokens)
        self.request_generation_tokens.note(len(output.tokens))
        if output.times is None or output.times.admitted is None:
            return
        self.prompt_tokens += 0 if counted else output.prompt_tokens
        self.cached_tokens += output.reused_tokens
        self._note_times(output.times, len(output.tokens))

    def _note_times(self, times: Times, tokens: int) -> None:
        """Note how long an ended output waited, prefilled and decoded."""
        admitted, end = times.admitted or times.queued, time.monotonic()
        self.queue_time.note(admitted - times.queued)
        self.e2e_latency.note(end - times.queued)
        self.inference_time.note(end - admitted)
        before = end - admitted if self._latency is None else self._latency
        self._latency = before + 0.1 * (end - admitted - before)
        if times.first is None or times.last is None:
            return
        self.prefill_time.note(times.first - admitted)
        self.decode_time.note(times.last - times.first)
        if tokens > 1:
            self.time_per_output_token.note((times.last - times.first) / (tokens - 1))

    def _note_step(self, made: Step) -> None:
        """Note the step of one request."""
        drafted, accepted = made.num_draft_tokens, made.num_accepted_tokens
        self.num_steps += 1
        self.lengths[drafted] += 1
        if not drafted:
            return
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        while len(self.accepted_per_position) < accepted:
            self.accepted_per_position.append(0)
            self.conditional.append(None)
        for i in range(accepted):
            self.accepted_per_position[i] += 1
        for i in range(min(accepted + 1, drafted, len(self.conditional))):
            passed, before = float(i < accepted), self.conditional[i]
            self.conditional[i] = passed if before is None else before + MEMORY * (passed - before)

    def _note_iteration(self, made: Sequence[Step], seconds: float) -> None:
        """Note the forwards of one step of the engine, each by its own clock; the time beside them is prefill."""
        rest = seconds
        for step in {id(step.timing): step for step in made}.values():
            alike = [other for other in made if other.timing is step.timing]
            kind = "draft" if any(other.num_draft_tokens for other in alike) else "plain"
            self._note_seconds(kind, step.num_requests, step.timing.total)
            rest -= step.timing.total
            for part in PARTS:
                self.part_seconds[part] += getattr(step.timing, part)
        if not made:
            self._note_seconds("prefill", 1, rest)

    def _note_seconds(self, kind: str, requests: int, seconds: float) -> None:
        size = 1 << (requests - 1).bit_length()
        self.steps[kind] += 1
        if (kind, size) not in self.step_seconds:
            self.step_seconds[kind, size] = Histogram(BETWEEN)
        self.step_seconds[kind, size].note(seconds)
