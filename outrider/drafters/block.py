"""The base of drafters whose head guesses a whole block in one forward (DFlash and its kin)."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from outrider.core.types import Guess, Request, Running
from outrider.drafters.marginal import MarginalDrafter
from outrider.drafters.protocol import Observed
from outrider.drafters.slotted import SlotState, SlottedDrafter, state_of
from outrider.lm.head import HeadLM, sees_all
from outrider.lm.protocol import Extension, Segment
from outrider.lm.tabular import TabularLM
from outrider.lm.target_info import TargetInfo


@dataclass(kw_only=True)
class BlockState(SlotState):
    """One request's slot of a block head, and the block that it guessed last; changes in place.

    The slot holds keys and values for every position before the anchor.

    Attributes:
        block: Logits for the positions behind the anchor, in order.
    """

    block: Float[Tensor, "depth vocab"] | None = None


@dataclass(frozen=True, kw_only=True)
class BlockDrafter(MarginalDrafter, SlottedDrafter):
    """Guess all tokens behind the anchor at once: one row per position, independent of the other guesses.

    The head reads the target's features of all positions before the anchor, and caches its keys and values for them.
    For a draft it reads a block behind them: the anchor, and one mask token per further position. All positions of the
    block see each other.

    A subclass states its taps, and how they become features.

    Attributes:
        lm: The head; a table in proofs.
        block_size: Positions of a block, the anchor's included.
        mask_id: The token that stands for an unknown token.
        from_anchor: Whether the anchor's position guesses the first token; otherwise the first mask's position does.

    References:
        DFlash 2026. https://arxiv.org/abs/2602.06036
    """

    lm: HeadLM | TabularLM
    block_size: int
    mask_id: int
    from_anchor: bool = False

    @property
    def max_context(self) -> int | None:
        return self.lm.max_context - self.block_size

    @property
    def max_depth(self) -> int:
        return self.block_size if self.from_anchor else self.block_size - 1

    @abstractmethod
    def features(self, taps: Mapping[int, Float[Tensor, "n hidden"]]) -> Float[Tensor, "n dim"]:
        """Features from the target's hidden states."""

    def open(self, request: Request) -> BlockState:
        return BlockState(slot=self.lm.open())

    def observe(self, states: Sequence[Running], observed: Observed) -> None:
        """Run the head on the new features. Its cache of a position does not depend on the token there."""
        features = self.features(observed.taps).to(self.lm.device, non_blocking=True)
        segments = []
        for i, state in enumerate(states):
            first, end = int(observed.offsets[i]), int(observed.offsets[i + 1])
            end = min(end, first + self.lm.max_context - self.lm.length(_own(state).slot))
            tokens = torch.from_numpy(observed.tokens[first:end]).to(self.lm.device, non_blocking=True)
            segments.append(Segment(slot=_own(state).slot, tokens=tokens, features=features[first:end], logits="none"))
        self.lm.extend(segments)
        self.lm.commit({segment.slot: range(len(segment.tokens)) for segment in segments})

    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        blocks = self.block(states, depths).logits.split(list(depths))
        for state, block in zip(states, blocks, strict=True):
            _own(state).block = block
        return Guess(logits=torch.stack([block[0] for block in blocks]), short_list=self.short_list)

    def block(self, states: Sequence[Running], depths: Sequence[int]) -> Extension:
        """Run the head on a block behind each request; nothing of it stays in the cache. The logits are those of the
        first `depths[i]` guesses.
        """
        size, first = self.block_size, 0 if self.from_anchor else 1
        tokens = torch.full((len(states), size), self.mask_id)
        tokens[:, 0] = torch.tensor([state.tokens[-1] for state in states])
        rows, sight = tokens.to(self.lm.device, non_blocking=True), sees_all(size)
        segments = [
            Segment(slot=_own(state).slot, tokens=row, logits=range(first, first + depth), sees=sight)
            for state, row, depth in zip(states, rows, depths, strict=True)
        ]
        extension = self.lm.extend(segments)
        self.lm.commit({segment.slot: [] for segment in segments})
        return extension

    def guessed(self, state: Running) -> Float[Tensor, "depth vocab"] | None:
        return _own(state).block

    def needs(self, state: object, length: int) -> int:
        return min(self.lm.length(state_of(BlockState, state).slot), length)

    def reuse(self, state: object, request: Request, length: int) -> BlockState:
        own = state_of(BlockState, state)
        self.lm.truncate(own.slot, self.needs(state, length))
        return BlockState(slot=own.slot)

    def fork(self, state: object, request: Request, length: int) -> BlockState:
        return BlockState(slot=self.lm.copy(state_of(BlockState, state).slot, self.needs(state, length)))

    def cast(self, target_info: TargetInfo) -> "BlockDrafter":
        return replace(self, lm=self.lm.cast(target_info.dtype))


def _own(state: Running) -> BlockState:
    return state_of(BlockState, state.drafter_state)
