"""A draft model: any causal LM over the target's vocabulary (Leviathan et al. 2023; Chen et al. 2023)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from outrider.drafters.protocol import Rows
from outrider.lm.protocol import LM, Segment
from outrider.types import Frontier, Guess, Request, Running

CHUNK = 512
"""Most tokens that one forward digests for one request."""
BACKLOG = 16
"""A backlog this long is digested as soon as it is known; a shorter one waits for the next draft's first forward."""


@dataclass(kw_only=True)
class ModelState:
    """One request's slot of the draft model; changes in place.

    Attributes:
        slot: Where the draft model keeps the request.
        fed: For each expanded node of the growing tree, its pending number in the slot.
    """

    slot: int
    fed: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Model:
    """Guess with the next-token distribution of `lm`.

    The draft model has digested every committed token but the newest one or two: after a full acceptance the last
    drafted token was never fed, so the first forward of a step feeds whatever is missing, the anchor last.
    """

    lm: LM

    @property
    def rows(self) -> Rows:
        return "sampled"

    @property
    def context_pure(self) -> bool:
        return True

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    @property
    def max_context(self) -> int | None:
        return self.lm.max_context

    def open(self, request: Request) -> ModelState:
        return ModelState(slot=self.lm.open())

    def begin(self, states: Sequence[Running]) -> Guess:
        self._digest(states, [len(s.tokens) - 1 - (len(s.tokens) - 1 - self._length(s)) % CHUNK for s in states])
        segments = [
            Segment(slot=_own(s).slot, tokens=self._tensor(s.tokens[self._length(s) :]), logits="last") for s in states
        ]
        logits = self.lm.extend(segments).logits
        self.lm.commit({piece.slot: range(len(piece.tokens)) for piece in segments})
        for s in states:
            _own(s).fed.clear()
        return Guess(logits=logits)

    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        tokens = frontier.tokens.to(self.lm.device)
        owners, starts = np.unique(frontier.owners, return_index=True)
        segments = []
        for owner, first, end in zip(owners, starts, [*starts[1:], len(frontier.owners)], strict=True):
            own = _own(states[owner])
            parents = [own.fed.get(parent, -1) for parent in frontier.parents[first:end].tolist()]
            for node in frontier.nodes[first:end].tolist():
                own.fed[node] = len(own.fed)
            segments.append(Segment(slot=own.slot, tokens=tokens[first:end], parents=np.array(parents)))
        return Guess(logits=self.lm.extend(segments).logits)

    def observe(
        self,
        states: Sequence[Running],
        tokens: Sequence[Sequence[int]],
        taps: Sequence[Mapping[int, Float[Tensor, "positions hidden"]]],
    ) -> None:
        known = [min(len(s.tokens) - 1, self._length(s) + len(t)) for s, t in zip(states, tokens, strict=True)]
        behind = [(s, end) for s, end in zip(states, known, strict=True) if end - self._length(s) >= BACKLOG]
        self._digest([s for s, _ in behind], [end for _, end in behind])

    def commit(self, states: Sequence[Running], paths: Sequence[Sequence[int]]) -> None:
        kept = {}
        for state, path in zip(states, paths, strict=True):
            own = _own(state)
            kept[own.slot] = [own.fed[node] for node in path if node in own.fed]
            own.fed.clear()
        self.lm.commit(kept)

    def rewind(self, state: object, length: int) -> None:
        """Forget all but the first `length` tokens."""
        slot = _state(state).slot
        self.lm.truncate(slot, min(length, self.lm.length(slot)))

    def close(self, state: object) -> None:
        self.lm.release(_state(state).slot)

    def _length(self, state: Running) -> int:
        return self.lm.length(_own(state).slot)

    def _tensor(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor(tokens).to(self.lm.device, non_blocking=True)

    def _digest(self, states: Sequence[Running], ends: Sequence[int]) -> None:
        """Feed each request's tokens up to `ends`, in chunks, keeping no logits."""
        pairs = list(zip(states, ends, strict=True))
        while pairs := [(s, end) for s, end in pairs if self._length(s) < min(end, self.lm.max_context)]:
            segments = []
            for s, end in pairs:
                first = self._length(s)
                last = min(end, first + CHUNK, self.lm.max_context)
                segments.append(Segment(slot=_own(s).slot, tokens=self._tensor(s.tokens[first:last]), logits="none"))
            self.lm.extend(segments)
            self.lm.commit({piece.slot: range(len(piece.tokens)) for piece in segments})


def _state(state: object) -> ModelState:
    if not isinstance(state, ModelState):
        raise TypeError(f"a draft model keeps a ModelState, got {type(state).__name__}")
    return state


def _own(state: Running) -> ModelState:
    return _state(state.drafter_state)
