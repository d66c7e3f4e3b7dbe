"""The automaton of a grammar, walked along the drafts of a request."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from outrider.core.types import InputError


@runtime_checkable
class Matcher(Protocol):
    """A position in a grammar; changes in place."""

    @property
    def ended(self) -> bool:
        """Whether an end token was accepted."""
        ...

    def fill(self, row: Int[Tensor, " words"]) -> None:
        """Write the packed mask of the tokens that may come next, end tokens among them; zeros if none may come.

        Raises:
            InputError: The library met a limit of its own, such as a grammar that is too ambiguous.
        """
        ...

    def accept(self, token: int) -> bool:
        """Advance by a token. False leaves the position as it was. Raises InputError as `fill`."""
        ...

    def fork(self) -> "Matcher":
        """A copy that changes by itself."""
        ...


@dataclass(kw_only=True)
class GrammarState:
    """The position of one request in its grammar; changes in place.

    Attributes:
        matcher: Stands at the newest committed token.
        nodes: The matchers of this step's nodes so far, by the tokens since the newest committed one; None for nodes
            that the grammar does not reach.
        rows: Their masks.
    """

    matcher: Matcher
    nodes: dict[tuple[int, ...], Matcher | None] = field(default_factory=dict)
    rows: dict[tuple[int, ...], Int[Tensor, " words"]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class GrammarConstraint:
    """A compiled grammar.

    Each node of a draft has a matcher, forked from its parent's. Matchers and masks that were made while the draft grew
    are reused when it is verified. Nothing is rolled back: after a rollback, llguidance 1.9.1 may give the mask of the
    text that was taken back.

    Attributes:
        begin: Makes a matcher at the grammar's beginning.
        num_words: Words of a mask.
        name: What messages call it.
    """

    begin: Callable[[], Matcher]
    num_words: int
    name: str

    def open(self) -> GrammarState:
        return GrammarState(matcher=self.begin())

    def masks(self, state: object, tokens: Sequence[int], parents: Sequence[int]) -> Int[Tensor, "nodes words"]:
        """The tokens that may follow each node. Raises InputError if no token may follow the root."""
        grammar_state = _state(state)
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append(() if parent < 0 else (*paths[parent], token))
        # A node comes behind its parent.
        for path in sorted(set(paths).difference(grammar_state.rows)):
            matcher = grammar_state.nodes[path] = self._next(grammar_state, path) if path else grammar_state.matcher
            row = self._silence() if matcher is None else self._row(matcher)
            if not row.any():
                if not path:
                    raise InputError(self._stuck())
                # The draft left the grammar's reachable part; plain decoding would not have come here.
                row = self._silence()
            grammar_state.rows[path] = row
        return torch.stack([grammar_state.rows[path] for path in paths])

    def commit(self, state: object, tokens: Sequence[int]) -> None:
        """Advance by emitted tokens. Raises InputError if the library does not accept a token that it allows."""
        grammar_state = _state(state)
        grammar_state.nodes.clear()
        grammar_state.rows.clear()
        for token in tokens:
            if not grammar_state.matcher.ended:
                if grammar_state.matcher.accept(token):
                    continue
                row = self._row(grammar_state.matcher)
                if not row.any():
                    raise InputError(self._stuck())
                if _allows(row, token):
                    raise InputError(
                        f"llguidance allows token {token} in {self.name} and does not accept it; write the grammar in "
                        "another way"
                    )
            raise RuntimeError(f"token {token} was emitted against {self.name}")

    def _next(self, state: GrammarState, path: tuple[int, ...]) -> Matcher | None:
        """The matcher of a node, forked from its parent's; None if the parent's mask forbids the token."""
        parent, token = state.nodes[path[:-1]], path[-1]
        if parent is None or parent.ended or not _allows(state.rows[path[:-1]], token):
            return None
        matcher = parent.fork()
        return matcher if matcher.accept(token) else None

    def _row(self, matcher: Matcher) -> Int[Tensor, " words"]:
        """The mask at the matcher's position; all ones behind the end."""
        row = self._silence()
        if not matcher.ended:
            matcher.fill(row)
        return row

    def _silence(self) -> Int[Tensor, " words"]:
        """The mask of a node that no verifier will reach."""
        return torch.full((self.num_words,), -1, dtype=torch.int32)

    def _stuck(self) -> str:
        return f"no token of the vocabulary goes on with {self.name}; it cannot be fulfilled here"


def _allows(row: Int[Tensor, " words"], token: int) -> bool:
    return bool(int(row[token // 32]) >> token % 32 & 1)


def _state(state: object) -> GrammarState:
    if not isinstance(state, GrammarState):
        raise TypeError(f"a grammar keeps a GrammarState, got {type(state).__name__}")
    return state
