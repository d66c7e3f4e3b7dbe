"""The base of drafters whose heads all guess from the target's last hidden state (Medusa and its kin)."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from outrider.drafters.marginal import MarginalDrafter
from outrider.drafters.protocol import Observed, Surroundings
from outrider.heads.state_heads import StateHeads
from outrider.types import Guess, Request, Running


@dataclass(kw_only=True)
class HeadsState:
    """What such heads keep of a request; changes in place.

    Attributes:
        num_seen: How many of its positions were observed.
        newest: The target's last hidden state at the last observed position; None before any.
        rows: Logits for the depths of the last draft.
    """

    num_seen: int = 0
    newest: Float[Tensor, " hidden"] | None = None
    rows: Float[Tensor, "depth width"] | None = None


@dataclass(frozen=True, kw_only=True)
class StateHeadsDrafter(MarginalDrafter):
    r"""Guess all tokens behind the anchor at once, one row per depth, from one hidden state.

    The state is that of the last position before the anchor: $f_n$, from which the target drew the anchor $x_{n+1}$.
    Head $i$ guesses $x_{n+2+i}$ from it, and reads neither the anchor nor the other guesses.

    Attributes:
        heads: The heads.
        tap: The hidden state that `observe` gets: what leaves the target's last layer.
        norm: The target's final norm, which the heads' input has passed.
    """

    heads: StateHeads
    tap: int
    vocab_size: int
    norm: Callable[[Tensor], Tensor] = field(compare=False, default=nn.Identity())

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.tap,)

    @property
    def max_depth(self) -> int:
        return self.heads.num_heads

    @property
    def device(self) -> torch.device:
        return self.heads.weight.device

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        return {"heads": self.heads}

    def open(self, request: Request) -> HeadsState:
        return HeadsState()

    def observe(self, states: Sequence[Running], observed: Observed) -> None:
        hidden = observed.taps[self.tap]
        for i, (state, count) in enumerate(zip(states, observed.counts(), strict=True)):
            if count:
                own = _own(state)
                own.num_seen += count
                # A copy, so that the states of all other positions can be freed.
                own.newest = hidden[int(observed.offsets[i + 1]) - 1].clone()

    @torch.inference_mode()
    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        newest = torch.stack([_newest(state) for state in states])
        hidden = self.norm(newest).to(self.heads.weight.device, self.heads.weight.dtype, non_blocking=True)
        numbers = range(min(max(depths), self.max_depth))
        rows = torch.stack([self.heads.logits(self.heads(hidden, i), i) for i in numbers], 1)
        rows = rows[..., : self.vocab_size] if self.short_list is None else rows
        for state, own_rows in zip(states, rows, strict=True):
            _own(state).rows = own_rows
        return Guess(logits=rows[:, 0], short_list=self.short_list)

    def guessed(self, state: Running) -> Float[Tensor, "depth width"] | None:
        return _own(state).rows

    def needs(self, state: object, length: int) -> int:
        seen = heads_state(state).num_seen
        # Only the state of the last position is kept.
        return seen if seen <= length else max(0, length - 1)

    def reuse(self, state: object, request: Request, length: int) -> HeadsState:
        own = heads_state(state)
        newest = own.newest if own.num_seen <= length else None
        return HeadsState(num_seen=self.needs(own, length), newest=newest)

    def fork(self, state: object, request: Request, length: int) -> HeadsState:
        return StateHeadsDrafter.reuse(self, state, request, length)

    def cast(self, surroundings: Surroundings) -> "StateHeadsDrafter":
        heads = copy.deepcopy(self.heads).to(surroundings.dtype)
        return replace(self, heads=heads, norm=surroundings.norm)


def randomise(heads: nn.Module, seed: int) -> None:
    """Give heads other random weights, for proofs on tables."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in heads.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64))


def heads_state(state: object) -> HeadsState:
    """A drafter's own state. Raises TypeError if it is another drafter's."""
    if not isinstance(state, HeadsState):
        raise TypeError(f"this drafter keeps a HeadsState, got {type(state).__name__}")
    return state


def _newest(state: Running) -> Float[Tensor, " hidden"]:
    newest = _own(state).newest
    if newest is None:
        raise RuntimeError("heads guess from a hidden state, and none was observed")
    return newest


def _own(state: Running) -> HeadsState:
    return heads_state(state.drafter_state)
