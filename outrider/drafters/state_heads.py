"""The base of drafters whose heads all guess from the target's last hidden state (Medusa and its kin)."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from outrider.core.types import Guess, Running
from outrider.drafters.last_state import LastState, LastStateDrafter, newest
from outrider.drafters.marginal import MarginalDrafter
from outrider.heads.state_heads import StateHeads
from outrider.lm.forwards.packed import packed
from outrider.lm.head import suited
from outrider.lm.target_info import TargetInfo

Heads = TypeVar("Heads", bound=StateHeads)


@dataclass(kw_only=True)
class HeadsState(LastState):
    """What such heads keep of a request; changes in place.

    Attributes:
        rows: Logits for the depths of the last draft.
    """

    rows: Float[Tensor, "depth width"] | None = None


@dataclass(frozen=True, kw_only=True)
class StateHeadsDrafter(MarginalDrafter, LastStateDrafter):
    r"""Guess all tokens behind the anchor at once, one row per depth, from one hidden state.

    The state is that of the last position before the anchor: $f_n$, from which the target drew the anchor $x_{n+1}$.
    Head $i$ guesses $x_{n+2+i}$ from it, and reads neither the anchor nor the other guesses.

    Attributes:
        heads: The heads.
        running: Their packed twin, which computes in their place; None: they compute themselves.
        norm: The target's final norm, which the heads' input has passed.
    """

    heads: StateHeads
    running: StateHeads | None = field(compare=False, default=None)
    vocab_size: int
    norm: Callable[[Tensor], Tensor] = field(compare=False, default=nn.Identity())

    @property
    def max_depth(self) -> int:
        return self.heads.num_heads

    @property
    def device(self) -> torch.device:
        return self.heads.weight.device

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        return {"heads": self.heads}

    def fresh(self, num_seen: int = 0, newest: Float[Tensor, " hidden"] | None = None) -> HeadsState:
        return HeadsState(num_seen=num_seen, newest=newest)

    @torch.inference_mode()
    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        read = self.norm(torch.stack([newest(state) for state in states]))
        hidden = read.to(self.heads.weight.device, self.heads.weight.dtype, non_blocking=True)
        heads, numbers = self.running or self.heads, range(min(max(depths), self.max_depth))
        rows = torch.stack([heads.logits(heads(hidden, i), i) for i in numbers], 1)
        rows = rows[..., : self.vocab_size] if self.short_list is None else rows
        for state, own_rows in zip(states, rows, strict=True):
            heads_state(state.drafter_state).rows = own_rows
        return Guess(logits=rows[:, 0], short_list=self.short_list)

    def guessed(self, state: Running) -> Float[Tensor, "depth width"] | None:
        return heads_state(state.drafter_state).rows

    def cast(self, target_info: TargetInfo) -> "StateHeadsDrafter":
        heads = copy.deepcopy(self.heads).to(target_info.dtype)
        return replace(self, heads=heads, running=None, norm=target_info.norm)


def running(heads: Heads, target_info: TargetInfo) -> Heads | None:
    """The packed twin of heads, where the target's forwards are packed or compiled; None elsewhere."""
    return packed(heads) if suited(target_info.target_forward, heads) == "packed" else None


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
