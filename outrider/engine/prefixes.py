"""Slots of ended requests. They stay allocated, so that a prompt with the same beginning can reuse their cache."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.core.types import Running
from outrider.decoding.progress import end
from outrider.decoding.protocol import Parts
from outrider.drafters.none import NoDrafter
from outrider.drafters.protocol import Drafter

BLOCK = 256
"""Tokens that are compared at once."""


@dataclass(frozen=True, kw_only=True)
class PrefixMatch:
    """A request whose text begins like a prompt.

    Attributes:
        state: The request.
        shared: Length of their common beginning, counting only tokens that are in the target's cache.
        warm: Whether the request has ended.
    """

    state: Running
    shared: int
    warm: bool

    @property
    def is_mostly_shared(self) -> bool:
        """Whether the common beginning is at least half of the request's text."""
        return 2 * self.shared >= len(self.state.tokens)


class Prefixes:
    """Ended requests whose slots stay allocated, the most recently used last. Changes in place.

    Attributes:
        num_reused_tokens: Prompt tokens so far that needed no prefill.
        parts: The target and the drafters that hold the slots.

    Args:
        parts: The target and the drafters that hold the slots.
        most: Most slots that stay allocated.
        most_tokens: Most tokens that they hold together; None sets no limit.
    """

    def __init__(self, parts: Parts, most: int, most_tokens: int | None = None) -> None:
        self.num_reused_tokens = 0
        self.parts = parts
        self._most = most
        self._most_tokens = most_tokens
        self._warm: list[Running] = []

    def __len__(self) -> int:
        return len(self._warm)

    @property
    def lengths(self) -> list[int]:
        """Tokens in the target's cache for each of them, the least recently used first."""
        return [self.parts.target.length(state.slot) for state in self._warm]

    @property
    def oldest(self) -> Running | None:
        """The request whose slot was used longest ago."""
        return self._warm[0] if self._warm else None

    @property
    def states(self) -> tuple[Running, ...]:
        """The ended requests, the most recently used last."""
        return tuple(self._warm)

    def keep(self, state: Running) -> None:
        """Keep the slot of an ended request. If there are too many slots, or too many tokens in them, release those
        that were used longest ago.
        """
        self._warm.append(state)
        while len(self._warm) > self._most or self._is_over(sum(self.lengths)):
            self.evict()

    def _is_over(self, tokens: int) -> bool:
        return self._most_tokens is not None and tokens > self._most_tokens

    def evict(self) -> None:
        """Release the slot that was used longest ago."""
        end(self.parts, self._warm.pop(0))

    def clear(self) -> None:
        """Release all slots."""
        while self._warm:
            self.evict()

    def forget(self, drafter: Drafter) -> None:
        """Release what a drafter keeps for ended requests. The target's cache stays."""
        for state in self._warm:
            if state.drafter is drafter:
                drafter.close(state.drafter_state)
                state.drafter, state.drafter_state = NoDrafter(), None

    def take(self, state: Running) -> None:
        """Remove a request whose slot a new request takes over."""
        self._warm = [other for other in self._warm if other is not state]

    def touch(self, state: Running) -> None:
        """Mark a slot as just used, so that it is kept longer."""
        self.take(state)
        self._warm.append(state)

    def is_read_by(self, prompt: Sequence[int], running: Iterable[Running], least: int) -> bool:
        """Whether a running request still reads a beginning of this prompt, and at least `least` of its tokens.

        Those tokens need not be read again if the prompt waits until they are in the cache. Tokens that are in some
        cache already are not counted.
        """
        most = len(prompt) - 1
        if most < least:
            return False
        prompt = list(prompt)
        coming = []
        for state in running:
            read = self.parts.target.length(state.slot)
            end = min(most, len(state.tokens) - 1)
            if end - read >= least:
                coming.append(_shared(state.tokens, prompt, end))
        if not coming:
            return False
        prefix = self.longest(prompt, running)
        return max(coming) - (0 if prefix is None else prefix.shared) >= least

    def longest(self, prompt: Sequence[int], running: Iterable[Running]) -> PrefixMatch | None:
        """The request with the longest common beginning; an ended request wins a tie; None if there is none."""
        prompt = list(prompt)
        num_warm, most, best = len(self._warm), 0, None
        for i, state in enumerate([*reversed(self._warm), *running]):
            # Most texts differ from the prompt before the longest beginning so far ends, and are left quickly.
            if len(state.tokens) <= most or state.tokens[: most + 1] != prompt[: most + 1]:
                continue
            num_read = min(self.parts.target.length(state.slot), len(prompt) - 1)
            if (shared := _shared(state.tokens, prompt, num_read)) > most:
                most, best = shared, PrefixMatch(state=state, shared=shared, warm=i < num_warm)
        return best


def _shared(ours: list[int], theirs: list[int], most: int) -> int:
    """Length of the common beginning of two texts, at most `most`. Long texts are compared block by block."""
    first = 0
    while first < most and ours[first : min(first + BLOCK, most)] == theirs[first : min(first + BLOCK, most)]:
        first = min(first + BLOCK, most)
    pairs = zip(ours[first : first + BLOCK], theirs[first : first + BLOCK], strict=False)
    return min(most, next((first + i for i, (one, other) in enumerate(pairs) if one != other), most))
