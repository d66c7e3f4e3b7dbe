"""The base of drafters that read the target's newest hidden state alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from outrider.drafters.protocol import Drafter, Observed
from outrider.types import Request, Running


@dataclass(kw_only=True)
class NewestState:
    """What such a drafter keeps of a request; changes in place.

    Attributes:
        num_seen: How many of its positions were observed.
        newest: The target's hidden state at the last observed position; None before any.
    """

    num_seen: int = 0
    newest: Float[Tensor, " hidden"] | None = None


State = TypeVar("State", bound=NewestState)


@dataclass(frozen=True, kw_only=True)
class NewestDrafter(Drafter):
    """Guess from one hidden state: that of the last position before the anchor.

    Attributes:
        tap: Which of the target's hidden states `observe` gets.
    """

    tap: int

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.tap,)

    def open(self, request: Request) -> NewestState:
        return NewestState()

    def observe(self, states: Sequence[Running], observed: Observed) -> None:
        hidden = observed.taps[self.tap]
        for i, (state, count) in enumerate(zip(states, observed.counts(), strict=True)):
            if count:
                own = newest_state(NewestState, state.drafter_state)
                own.num_seen += count
                # A copy, so that the states of all other positions can be freed.
                own.newest = hidden[int(observed.offsets[i + 1]) - 1].clone()

    def newest(self, states: Sequence[Running]) -> Float[Tensor, "requests hidden"]:
        """The newest hidden state of each request."""
        found = [newest_state(NewestState, state.drafter_state).newest for state in states]
        known = [each for each in found if each is not None]
        if len(known) < len(found):
            raise RuntimeError("this drafter guesses from a hidden state, and none was observed")
        return torch.stack(known)

    def needs(self, state: object, length: int) -> int:
        seen = newest_state(NewestState, state).num_seen
        # Only the state of the last position is kept.
        return seen if seen <= length else max(0, length - 1)

    def reuse(self, state: object, request: Request, length: int) -> NewestState:
        own, fresh = newest_state(NewestState, state), newest_state(NewestState, self.open(request))
        fresh.num_seen, fresh.newest = self.needs(own, length), own.newest if own.num_seen <= length else None
        return fresh

    def fork(self, state: object, request: Request, length: int) -> NewestState:
        return self.reuse(state, request, length)


def newest_state(kind: type[State], state: object) -> State:
    """A drafter's own state. Raises TypeError if it is another drafter's."""
    if not isinstance(state, kind):
        raise TypeError(f"this drafter keeps a {kind.__name__}, got {type(state).__name__}")
    return state
