"""The base of drafters that guess from the target's newest hidden state alone (Medusa, Hydra, MLP speculators)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from outrider.core.types import Request, Running
from outrider.drafters.protocol import Drafter, Observed


@dataclass(kw_only=True)
class LastState:
    """What a drafter keeps of a request; changes in place.

    Attributes:
        num_seen: How many of its positions were observed.
        newest: The target's hidden state at the last observed position; None before any.
    """

    num_seen: int = 0
    newest: Float[Tensor, " hidden"] | None = None


@dataclass(frozen=True, kw_only=True)
class LastStateDrafter(Drafter):
    """Keep the target's hidden state at the last position before the anchor: $f_n$, from which the target drew the
    anchor $x_{n+1}$.

    Attributes:
        tap: The hidden state that `observe` gets.
    """

    context_pure: ClassVar[bool] = False

    tap: int

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.tap,)

    def fresh(self, num_seen: int = 0, newest: Float[Tensor, " hidden"] | None = None) -> LastState:
        """The state of a request."""
        return LastState(num_seen=num_seen, newest=newest)

    def open(self, request: Request) -> LastState:
        return self.fresh()

    def observe(self, states: Sequence[Running], observed: Observed) -> None:
        hidden = observed.taps[self.tap]
        for i, (state, count) in enumerate(zip(states, observed.counts(), strict=True)):
            if count:
                own = last_state(state.drafter_state)
                own.num_seen += count
                # A copy, so that the states of all other positions can be freed.
                own.newest = hidden[int(observed.offsets[i + 1]) - 1].clone()

    def needs(self, state: object, length: int) -> int:
        seen = last_state(state).num_seen
        # Only the state of the last position is kept.
        return seen if seen <= length else max(0, length - 1)

    def reuse(self, state: object, request: Request, length: int) -> LastState:
        own = last_state(state)
        return self.fresh(self.needs(own, length), own.newest if own.num_seen <= length else None)

    def fork(self, state: object, request: Request, length: int) -> LastState:
        return LastStateDrafter.reuse(self, state, request, length)


def newest(state: Running) -> Float[Tensor, " hidden"]:
    """The hidden state that a request's next draft is guessed from."""
    found = last_state(state.drafter_state).newest
    if found is None:
        raise RuntimeError("this drafter guesses from a hidden state, and none was observed")
    return found


def last_state(state: object) -> LastState:
    """The state of such a drafter. Raises TypeError if it is another drafter's."""
    if not isinstance(state, LastState):
        raise TypeError(f"this drafter keeps a LastState, got {type(state).__name__}")
    return state
