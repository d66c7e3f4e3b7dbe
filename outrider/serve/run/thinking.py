"""A constraint that begins behind the model's reasoning."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor

from outrider.core.constraint import Constraint


@dataclass(kw_only=True)
class ThinkingState:
    """The position of one request; changes in place.

    Attributes:
        inner: The state of the constraint behind the reasoning.
        phase: `start`: the first token may open the reasoning. `thinking`: all tokens but end tokens are free.
            `behind`: the constraint holds.
        recent: The newest tokens of the reasoning.
    """

    inner: object
    phase: str
    recent: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, eq=False)
class BehindThinking:
    """Follows a constraint as soon as the reasoning is closed. An output that does not reason follows it at once.

    Attributes:
        inner: The constraint.
        opens: Token that opens the reasoning as an output's first one; None where the output cannot open it.
        closes: Tokens that close it.
        inside: Whether the prompt has opened it already.
        eos_ids: Tokens that end an output, which cannot come before the constraint holds.
        num_words: Words of a mask.
    """

    inner: Constraint
    opens: int | None
    closes: tuple[int, ...]
    inside: bool
    eos_ids: frozenset[int]
    num_words: int

    def open(self) -> ThinkingState:
        """State before the first token."""
        phase = "thinking" if self.inside else "behind" if self.opens is None else "start"
        return ThinkingState(inner=self.inner.open(), phase=phase)

    def masks(self, state: object, tokens: Sequence[int], parents: Sequence[int]) -> Int[Tensor, "nodes words"]:
        """The tokens that may follow each node."""
        at = _state(state)
        if at.phase == "behind":
            return self.inner.masks(at.inner, tokens, parents)
        masks = self._free().repeat(len(tokens), 1)
        for gate, below in self._gates(at, tokens, parents).items():
            places = {node: i for i, node in enumerate(below)}
            above = [-1 if node == gate else places[parents[node]] for node in below]
            masks[below] = self.inner.masks(at.inner, [tokens[node] for node in below], above)
            if at.phase == "start" and parents[gate] < 0:
                word, bit = divmod(self.opens or 0, 32)
                masks[gate, word] |= 1 << bit if bit < 31 else -(1 << 31)
        return masks

    def commit(self, state: object, tokens: Sequence[int]) -> None:
        """Take in emitted tokens."""
        at = _state(state)
        for i, token in enumerate(tokens):
            at.phase = self._after(at.phase, at.recent, token)
            if at.phase == "constrained" or at.phase == "behind":
                # The token that closes the reasoning is none of the constraint's.
                first = i if at.phase == "constrained" else i + 1
                at.phase = "behind"
                self.inner.commit(at.inner, tokens[first:])
                return
            at.recent = [*at.recent, token][-len(self.closes) :]

    def _after(self, phase: str, recent: Sequence[int], token: int) -> str:
        """The phase behind one more token; `constrained` if the token itself is under the constraint already."""
        if phase == "behind":
            return "constrained"
        if phase == "start":
            return "thinking" if token == self.opens else "constrained"
        return "behind" if (*recent, token)[-len(self.closes) :] == self.closes else "thinking"

    def _gates(self, at: ThinkingState, tokens: Sequence[int], parents: Sequence[int]) -> dict[int, list[int]]:
        """The nodes behind which the constraint begins, each with the nodes below it."""
        phases, recents, gates = [at.phase], [at.recent], [0 if at.phase == "start" else -1]
        for node in range(1, len(tokens)):
            above = parents[node]
            phase = self._after(phases[above], recents[above], tokens[node])
            gates.append(gates[above] if phase == "constrained" else node if phase == "behind" else -1)
            phases.append("behind" if phase == "constrained" else phase)
            recents.append([*recents[above], tokens[node]][-len(self.closes) :])
        below: dict[int, list[int]] = {}
        for node, gate in enumerate(gates):
            if gate >= 0:
                below.setdefault(gate, []).append(node)
        return below

    def _free(self) -> Int[Tensor, "1 words"]:
        """The mask of the reasoning."""
        row = torch.full((1, self.num_words), -1, dtype=torch.int32)
        for token in self.eos_ids:
            word, bit = divmod(token, 32)
            row[0, word] &= ~(1 << bit if bit < 31 else -(1 << 31))
        return row


def _state(state: object) -> ThinkingState:
    if not isinstance(state, ThinkingState):
        raise TypeError(f"this constraint keeps a ThinkingState, got {type(state).__name__}")
    return state
