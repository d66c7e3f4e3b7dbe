"""Slots of ended requests. They stay allocated, so that a prompt with the same beginning can reuse their cache."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.core.types import Running
from outrider.decoding.progress import end
from outrider.decoding.protocol import Parts

BLOCK = 256
"""Tokens that are compared at once."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A request whose text begins like a prompt.

    Attributes:
        state: The request.
        shared: Length of their common beginning, counting only tokens that are in the target's cache.
        warm: Whether the request has ended.
    """

    state: Running
    shared: int
    warm: bool


class Prefixes:
    """Ended requests whose slots stay allocated, the most recently used last. Changes in place.

    Attributes:
        num_reused_tokens: Prompt tokens so far that needed no prefill.
        parts: The target and the drafters that hold the slots.

    Args:
        parts: The target and the drafters that hold the slots.
        most: Most slots that stay allocated.
    """

    def __init__(self, parts: Parts, most: int) -> None:
        self.num_reused_tokens = 0
        self.parts = parts
        self._most = most
        self._warm: list[Running] = []

    def __len__(self) -> int:
        return len(self._warm)

    @property
    def oldest(self) -> Running | None:
        """The request whose slot was used longest ago."""
        return self._warm[0] if self._warm else None

    @property
    def states(self) -> tuple[Running, ...]:
        """The ended requests, the most recently used last."""
        return tuple(self._warm)

    def keep(self, state: Running) -> None:
        """Keep the slot of an ended request. If there are too many, release the slot that was used longest ago."""
        self._warm.append(state)
        while len(self._warm) > self._most:
            self.evict()

    def evict(self) -> None:
        """Release the slot that was used longest ago."""
        end(self.parts, self._warm.pop(0))

    def clear(self) -> None:
        """Release all slots."""
        while self._warm:
            self.evict()

    def take(self, state: Running) -> None:
        """Remove a request whose slot a new request takes over."""
        self._warm = [other for other in self._warm if other is not state]

    def touch(self, state: Running) -> None:
        """Mark a slot as just used, so that it is kept longer."""
        self.take(state)
        self._warm.append(state)

    def longest(self, prompt: Sequence[int], running: Iterable[Running]) -> Found | None:
        """The request with the longest common beginning; an ended request wins a tie; None if there is none."""
        prompt = list(prompt)
        warm = [self._found(prompt, state, warm=True) for state in reversed(self._warm)]
        others = [self._found(prompt, state, warm=False) for state in running]
        best = max([*warm, *others], key=lambda found: found.shared, default=None)
        return best if best is not None and best.shared else None

    def _found(self, prompt: list[int], state: Running, warm: bool) -> Found:
        num_read = min(self.parts.target.length(state.slot), len(prompt) - 1)
        return Found(state=state, shared=_shared(state.tokens, prompt, num_read), warm=warm)


def _shared(ours: list[int], theirs: list[int], most: int) -> int:
    """Length of the common beginning of two texts, at most `most`. Long texts are compared block by block."""
    first = 0
    while first < most and ours[first : min(first + BLOCK, most)] == theirs[first : min(first + BLOCK, most)]:
        first = min(first + BLOCK, most)
    pairs = zip(ours[first : first + BLOCK], theirs[first : first + BLOCK], strict=False)
    return min(most, next((first + i for i, (one, other) in enumerate(pairs) if one != other), most))
