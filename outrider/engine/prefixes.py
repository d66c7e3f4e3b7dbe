"""Slots of ended requests, kept so that a prompt that begins as they do need not be digested from its beginning."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.decoding.progress import end
from outrider.decoding.protocol import Parts
from outrider.types import Running


@dataclass(frozen=True, kw_only=True)
class Found:
    """A request whose text begins like a prompt.

    Attributes:
        state: The request.
        shared: How many tokens they have in common, of those that the target has digested.
        warm: Whether it has ended.
    """

    state: Running
    shared: int
    warm: bool


class Prefixes:
    """Ended requests whose slots stay allocated, the last used at the end. Changes in place.

    Attributes:
        num_reused_tokens: Prompt tokens so far that did not need to be digested.

    Args:
        parts: Give slots back.
        most: Most slots that stay allocated.
    """

    def __init__(self, parts: Parts, most: int) -> None:
        self.num_reused_tokens = 0
        self._parts = parts
        self._most = most
        self._warm: list[Running] = []

    def __len__(self) -> int:
        return len(self._warm)

    @property
    def oldest(self) -> Running | None:
        """The one that was used longest ago."""
        return self._warm[0] if self._warm else None

    def keep(self, state: Running) -> None:
        """Keep an ended request's slot, and give back the slot that was used longest ago if there are too many."""
        self._warm.append(state)
        while len(self._warm) > self._most:
            self.evict()

    def evict(self) -> None:
        """Give back the slot that was used longest ago."""
        end(self._parts, self._warm.pop(0))

    def clear(self) -> None:
        """Give back all slots."""
        while self._warm:
            self.evict()

    def take(self, state: Running) -> None:
        """Let go of a slot that somebody uses from now on."""
        self._warm = [other for other in self._warm if other is not state]

    def touch(self, state: Running) -> None:
        """Note that a slot was of use, so that it is kept longer."""
        self.take(state)
        self._warm.append(state)

    def longest(self, prompt: Sequence[int], running: Iterable[Running]) -> Found | None:
        """The request with the longest common beginning, an ended one before one that runs; None if there is none."""
        warm = [self._found(prompt, state, warm=True) for state in reversed(self._warm)]
        others = [self._found(prompt, state, warm=False) for state in running]
        best = max([*warm, *others], key=lambda found: found.shared, default=None)
        return best if best is not None and best.shared else None

    def _found(self, prompt: Sequence[int], state: Running, warm: bool) -> Found:
        digested = min(self._parts.target.length(state.slot), len(prompt) - 1)
        pairs = zip(state.tokens[:digested], prompt, strict=False)
        shared = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), digested)
        return Found(state=state, shared=shared, warm=warm)
