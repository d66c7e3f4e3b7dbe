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
        own = _own(state)
        if own.phase == "behind":
            return self.inner.masks(own.inner, tokens, parents)
        found = self._free().repeat(len(tokens), 1)
        for gate, below in self._gates(own, tokens, parents).items():
            places = {node: i for i, node in enumerate(below)}
            above = [-1 if node == gate else places[parents[node]] for node in below]
            found[below] = self.inner.masks(own.inner, [tokens[node] for node in below], above)
            if own.phase == "start" and parents[gate] < 0:
                word, bit = divmod(self.opens or 0, 32)
                found[gate, word] |= 1 << bit if bit < 31 else -(1 << 31)
        return found

    def commit(self, state: object, tokens: Sequence[int]) -> None:
        """Take in emitted tokens."""
        own = _own(state)
        for i, token in enumerate(tokens):
            own.phase = self._after(own.phase, own.recent, token)
            if own.phase == "constrained" or own.phase == "behind":
                # The token that closes the reasoning is none of the constraint's.
                first = i if own.phase == "constrained" else i + 1
                own.phase = "behind"
                self.inner.commit(own.inner, tokens[first:])
                return
            own.recent = [*own.recent, token][-len(self.closes) :]

    def _after(self, phase: str, recent: Sequence[int], token: int) -> str:
        """The phase behind one more token; `constrained` if the token itself is under the constraint already."""
        if phase == "behind":
            return "constrained"
        if phase == "start":
            return "thinking" if token == self.opens else "constrained"
        return "behind" if (*recent, token)[-len(self.closes) :] == self.closes else "thinking"

    def _gates(self, own: ThinkingState, tokens: Sequence[int], parents: Sequence[int]) -> dict[int, list[int]]:
        """The nodes behind which the constraint begins, each with the nodes below it."""
        phases, recents, gates = [own.phase], [own.recent], [0 if own.phase == "start" else -1]
        for node in range(1, len(tokens)):
            above = parents[node]
            phase = self._after(phases[above], recents[above], tokens[node])
            gates.append(gates[above] if phase == "constrained" else node if phase == "behind" else -1)
            phases.append("behind" if phase == "constrained" else phase)
            recents.append([*recents[above], tokens[node]][-len(self.closes) :])
        found: dict[int, list[int]] = {}
        for node, gate in enumerate(gates):
            if gate >= 0:
                found.setdefault(gate, []).append(node)
        return found

    def _free(self) -> Int[Tensor, "1 words"]:
        """The mask of the reasoning."""
        row = torch.full((1, self.num_words), -1, dtype=torch.int32)
        for token in self.eos_ids:
            word, bit = divmod(token, 32)
            row[0, word] &= ~(1 << bit if bit < 31 else -(1 << 31))
        return row


def _own(state: object) -> ThinkingState:
    if not isinstance(state, ThinkingState):
        raise TypeError(f"this constraint keeps a ThinkingState, got {type(state).__name__}")
    return state
