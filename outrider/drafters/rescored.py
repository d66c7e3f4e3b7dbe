"""Blockwise heads whose guesses a small language model chooses among (Kim et al. 2024, local rescoring)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from outrider.core.types import Frontier, Guess, Request, Running
from outrider.drafters.blockwise import BlockwiseDrafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.protocol import Observed, Rows
from outrider.drafters.state_heads import HeadsState, heads_state
from outrider.lm.target_info import TargetInfo


@dataclass(kw_only=True)
class RescoredState(HeadsState):
    """What the heads keep of a request, and what the language model keeps; changes in place.

    Attributes:
        rescorer: The language model's state.
    """

    rescorer: object


@dataclass(frozen=True, kw_only=True)
class RescoredDrafter(BlockwiseDrafter):
    r"""Draft a chain, left to right: of the `top_k` likeliest tokens of a depth's head, the one with the largest

    $(1 - \lambda)\,a_i(v) + \lambda\,r(v \mid \text{context}, y_1 \ldots y_{i-1})$.

    $a_i$ are the head's logits and $r$ those of the language model behind the draft so far. So each draft token costs
    a forward of the language model. With $\lambda = 0$ the draft is that of the heads alone.

    Attributes:
        rescorer: The language model. Its cache holds committed tokens.
        lam: $\lambda$.
        top_k: How many tokens of each head it chooses among.

    References:
        Kim et al. 2024, Exploring and improving drafts in blockwise parallel decoding.
        https://arxiv.org/abs/2404.09221
    """

    rows: ClassVar[Rows] = "point"
    keeps_cache: ClassVar[bool] = True

    rescorer: ModelDrafter
    lam: float
    top_k: int

    @property
    def max_context(self) -> int | None:
        return self.rescorer.max_context

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        return {**super().modules, **self.rescorer.modules}

    def open(self, request: Request) -> RescoredState:
        return RescoredState(rescorer=self.rescorer.open(request))

    def observe(self, states: Sequence[Running], observed: Observed) -> None:
        super().observe(states, observed)
        self.rescorer.observe(_theirs(states), observed)

    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        super().begin(states, depths)
        guess = self.rescorer.begin(_theirs(states), depths)
        return Guess(tokens=self._chosen(states, [0] * len(states), guess))

    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        guess = self.rescorer.expand(_theirs(states), frontier)
        owners = [states[owner] for owner in frontier.owners.tolist()]
        return Guess(tokens=self._chosen(owners, frontier.depths.tolist(), guess))

    def commit(self, states: Sequence[Running], paths: Sequence[Sequence[int]]) -> None:
        self.rescorer.commit(_theirs(states), paths)

    def reuse(self, state: object, request: Request, length: int) -> RescoredState:
        kept = super().reuse(state, request, length)
        theirs = self.rescorer.reuse(_state(state).rescorer, request, length)
        return RescoredState(num_seen=kept.num_seen, newest=kept.newest, rescorer=theirs)

    def fork(self, state: object, request: Request, length: int) -> RescoredState:
        kept = super().fork(state, request, length)
        theirs = self.rescorer.fork(_state(state).rescorer, request, length)
        return RescoredState(num_seen=kept.num_seen, newest=kept.newest, rescorer=theirs)

    def close(self, state: object) -> None:
        self.rescorer.close(_state(state).rescorer)

    def cast(self, target_info: TargetInfo) -> "RescoredDrafter":
        made = super().cast(target_info)
        return replace(self, heads=made.heads, running=None, norm=made.norm, rescorer=self.rescorer.cast(target_info))

    def on_tables(self, vocab_size: int, seed: int) -> "RescoredDrafter":
        made, theirs = super().on_tables(vocab_size, seed), self.rescorer.on_tables(vocab_size, seed + 1)
        return replace(
            self, heads=made.heads, running=None, tap=made.tap, vocab_size=vocab_size, norm=made.norm, rescorer=theirs
        )

    @torch.inference_mode()
    def _chosen(self, states: Sequence[Running], depths: Sequence[int], guess: Guess) -> Int[np.ndarray, " n"]:
        """The token behind a node of each depth, from the language model's guess there."""
        rows = torch.stack([self.row(state, depth) for state, depth in zip(states, depths, strict=True)])
        best = rows.topk(min(self.top_k, rows.shape[1]), -1)
        theirs = _logits(guess).to(rows.device).gather(-1, best.indices)
        mixed = (1 - self.lam) * best.values + self.lam * theirs
        return best.indices.gather(-1, mixed.argmax(-1, keepdim=True))[:, 0].cpu().numpy()


def _logits(guess: Guess) -> Float[Tensor, "n vocab"]:
    if guess.logits is None:
        raise TypeError("a language model guesses logits")
    return guess.logits


def _theirs(states: Sequence[Running]) -> list[Running]:
    """The requests as the language model sees them."""
    return [replace(state, drafter_state=_state(state.drafter_state).rescorer) for state in states]


def _state(state: object) -> RescoredState:
    own = heads_state(state)
    if not isinstance(own, RescoredState):
        raise TypeError(f"this drafter keeps a RescoredState, got {type(own).__name__}")
    return own
