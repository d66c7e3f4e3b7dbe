"""Heads that guess one token after another from one hidden state of the target: the module and the drafter."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.core.types import Frontier, Guess, Running
from outrider.drafters.protocol import Rows
from outrider.heads.trunks.last_state import LastState, LastStateHead, LastStateHeadDrafter
from outrider.lm.slots.batch import upload
from outrider.trees.chained import Follow


class SequentialHead(LastStateHead):
    r"""Reads the target's hidden state $f_n$, then the anchor and the draft tokens one by one.

    What was read is a vector, the state. `begin` makes it of $f_n$; `read` adds the token at depth $d = 0, 1, \ldots$,
    the anchor's first; `logits` guesses the token at depth $d + 1$.
    """

    @abstractmethod
    def begin(self, hidden: Float[Tensor, "n hidden"]) -> Float[Tensor, "n state"]:
        """The state before the anchor is read."""

    @abstractmethod
    def read(self, state: Float[Tensor, "n before"], tokens: Int[Tensor, " n"], depth: int) -> Float[Tensor, "n state"]:
        """The state after one more token, all at one depth."""

    @abstractmethod
    def logits(self, state: Float[Tensor, "n state"], depth: int) -> Float[Tensor, "n vocab"]:
        """Logits of the token behind one at this depth."""


@dataclass(kw_only=True)
class SequentialState(LastState):
    """What such a drafter keeps of a request; changes in place.

    Attributes:
        read: For the root and each expanded node, what the head has read until there.
    """

    read: dict[int, Float[Tensor, " state"]] = field(default_factory=dict)


Sequential = TypeVar("Sequential", bound=SequentialState)


@dataclass(frozen=True, kw_only=True)
class SequentialDrafter(LastStateHeadDrafter[Sequential]):
    """Guess by a head that reads the target's newest hidden state, the anchor, and the draft tokens one by one."""

    rows: ClassVar[Rows] = "sampled"
    state: ClassVar[type[Any]] = SequentialState

    head: SequentialHead

    @torch.inference_mode()
    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        hidden, weight = self.newest(states), self.head.weight
        before = self.computing.begin(hidden.to(weight.device, weight.dtype, non_blocking=True))
        anchors = torch.tensor([state.tokens[-1] for state in states])
        for state in states:
            self.state_of(state).read = {}
        return self._guess(states, [0] * len(states), before, anchors, 0)

    @torch.inference_mode()
    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        owners = [states[owner] for owner in frontier.owners.tolist()]
        above = zip(owners, frontier.parents.tolist(), strict=True)
        before = torch.stack([self.state_of(owner).read[parent] for owner, parent in above])
        # All nodes of a frontier have one depth.
        return self._guess(owners, frontier.nodes.tolist(), before, frontier.tokens, int(frontier.depths[0]))

    def chain(self, states: Sequence[Running], counts: Sequence[int]) -> Follow:
        left, depth = np.array(counts), 0
        read = torch.stack([self.state_of(state).read[0] for state in states])

        @torch.inference_mode()
        def step(tokens: Int[Tensor, " n"]) -> Float[Tensor, "n width"]:
            nonlocal left, depth, read
            if not (left > 0).all():
                read = read[upload([np.flatnonzero(left > 0)], read.device)[0]]
            left, depth = left[left > 0] - 1, depth + 1
            read = self.computing.read(read, tokens.to(read.device, non_blocking=True), depth)
            return self.computing.logits(read, depth)[..., : self.vocab_size]

        return step

    def _guess(
        self,
        owners: Sequence[Running],
        nodes: Sequence[int],
        before: Float[Tensor, "n before"],
        tokens: Int[Tensor, " n"],
        depth: int,
    ) -> Guess:
        """Guesses behind nodes of one depth, whose tokens are read and kept."""
        read = self.computing.read(before, tokens.to(before.device, non_blocking=True), depth)
        for owner, node, row in zip(owners, nodes, read, strict=True):
            self.state_of(owner).read[node] = row
        return Guess(logits=self.computing.logits(read, depth)[..., : self.vocab_size])
