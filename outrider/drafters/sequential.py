"""The base of drafters with a `SequentialHead`: every guess reads the tokens before it, and no keys and values."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from outrider.core.types import Frontier, Guess, Running
from outrider.drafters.head_path import HeadPath
from outrider.drafters.last_state import LastState, LastStateDrafter, newest
from outrider.drafters.protocol import Rows
from outrider.heads.sequential import SequentialHead
from outrider.lm.forwards.packed import packed
from outrider.lm.head import suited
from outrider.lm.target_info import TargetInfo
from outrider.trees.chained import Follow

Own = TypeVar("Own", bound="SequentialDrafter")


@dataclass(kw_only=True)
class SequentialState(LastState):
    """What such a drafter keeps of a request; changes in place.

    Attributes:
        read: For the root and each expanded node, what the head has read until there.
    """

    read: dict[int, Float[Tensor, " state"]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SequentialDrafter(LastStateDrafter):
    """Guess by a head that reads the target's newest hidden state, the anchor, and the draft tokens one by one.

    Attributes:
        head: The head.
        running: Its packed twin, which computes in its place; None: it computes itself.
        vocab_size: Width of the target's logits.
    """

    rows: ClassVar[Rows] = "sampled"

    head: SequentialHead
    running: SequentialHead | None = field(compare=False, default=None)
    vocab_size: int

    @property
    def max_depth(self) -> int:
        return self.head.max_depth

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def modules(self) -> dict[str, nn.Module]:
        return {"head": self.head}

    def features(self, hidden: Float[Tensor, "n hidden"]) -> Float[Tensor, "n hidden"]:
        """What the head reads, from the tapped states; by default these themselves."""
        return hidden

    def fresh(self, num_seen: int = 0, newest: Float[Tensor, " hidden"] | None = None) -> SequentialState:
        return SequentialState(num_seen=num_seen, newest=newest)

    @torch.inference_mode()
    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        hidden = self.features(torch.stack([newest(state) for state in states]))
        weight = self.head.weight
        before = self._computing.begin(hidden.to(weight.device, weight.dtype, non_blocking=True))
        anchors = torch.tensor([state.tokens[-1] for state in states])
        for state in states:
            _own(state).read = {}
        return self._guess(states, [0] * len(states), before, anchors, 0)

    @torch.inference_mode()
    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        owners = [states[owner] for owner in frontier.owners.tolist()]
        above = zip(owners, frontier.parents.tolist(), strict=True)
        before = torch.stack([_own(owner).read[parent] for owner, parent in above])
        # All nodes of a frontier have one depth.
        return self._guess(owners, frontier.nodes.tolist(), before, frontier.tokens, int(frontier.depths[0]))

    def chain(self, states: Sequence[Running], counts: Sequence[int]) -> Follow:
        left, depth = np.array(counts), 0
        read = torch.stack([_own(state).read[0] for state in states])

        @torch.inference_mode()
        def step(tokens: Int[Tensor, " n"]) -> Float[Tensor, "n width"]:
            nonlocal left, depth, read
            if not (left > 0).all():
                read = read[torch.from_numpy(np.flatnonzero(left > 0)).to(read.device)]
            left, depth = left[left > 0] - 1, depth + 1
            read = self._computing.read(read, tokens.to(read.device, non_blocking=True), depth)
            return self._computing.logits(read, depth)[..., : self.vocab_size]

        return step

    def cast(self: Own, target_info: TargetInfo) -> Own:
        return replace(self, head=copy.deepcopy(self.head).to(target_info.dtype), running=None)

    @property
    def _computing(self) -> SequentialHead:
        return self.running or self.head

    def _guess(
        self,
        owners: Sequence[Running],
        nodes: Sequence[int],
        before: Float[Tensor, "n before"],
        tokens: Int[Tensor, " n"],
        depth: int,
    ) -> Guess:
        """Guesses behind nodes of one depth, whose tokens are read and kept."""
        read = self._computing.read(before, tokens.to(before.device, non_blocking=True), depth)
        for owner, node, row in zip(owners, nodes, read, strict=True):
            _own(owner).read[node] = row
        return Guess(logits=self._computing.logits(read, depth)[..., : self.vocab_size])


def placed(
    path: HeadPath, head: SequentialHead, target_info: TargetInfo
) -> tuple[SequentialHead, SequentialHead | None]:
    """A head where its path says, and its packed twin where that is of use."""
    device, dtype = path.place(target_info)
    found = head.to(device, dtype).eval().requires_grad_(False)
    return found, packed(found) if suited(target_info.target_forward, found) == "packed" else None


def _own(state: Running) -> SequentialState:
    if not isinstance(state.drafter_state, SequentialState):
        raise TypeError(f"this drafter keeps a SequentialState, got {type(state.drafter_state).__name__}")
    return state.drafter_state
