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
        """Advance by a token. False leaves the position as it was."""
        ...

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens."""
        ...


@dataclass(kw_only=True)
class GrammarState:
    """The position of one request in its grammar; changes in place.

    Attributes:
        matcher: Stands at the newest committed token between calls.
        rows: Masks of this step so far, by the tokens since the newest committed one.
    """

    matcher: Matcher
    rows: dict[tuple[int, ...], Int[Tensor, " words"]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class GrammarConstraint:
    """A compiled grammar.

    The masks of a draft come from one depth-first walk of the automaton, which rolls a token back when it turns round.
    Masks that were computed while the draft grew are reused when it is verified.

    Attributes:
        begin: Makes a matcher at the grammar's beginning.
        num_words: Words of a mask.
        name: What messages call it.
        library: The library that serves it.
    """

    begin: Callable[[], Matcher]
    num_words: int
    name: str
    library: str

    def open(self) -> GrammarState:
        return GrammarState(matcher=self.begin())

    def masks(self, state: object, tokens: Sequence[int], parents: Sequence[int]) -> Int[Tensor, "nodes words"]:
        """The tokens that may follow each node. Raises InputError if no token may follow the root."""
        own = _state(state)
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append(() if parent < 0 else (*paths[parent], token))
        walked: list[int] = []
        for path in sorted(set(paths).difference(own.rows)):
            shared = next((i for i, (a, b) in enumerate(zip(walked, path, strict=False)) if a != b), len(walked))
            own.matcher.rollback(len(walked) - shared)
            del walked[shared:]
            while len(walked) < len(path) and self._goes_on(own, walked, path[len(walked)]):
                walked.append(path[len(walked)])
            row = self._row(own) if len(walked) == len(path) else self._silence()
            if not row.any():
                if not path:
                    raise InputError(self._stuck())
                # The draft left the grammar's reachable part; plain decoding would not have come here.
                row = self._silence()
            own.rows[path] = row
        own.matcher.rollback(len(walked))
        return torch.stack([own.rows[path] for path in paths])

    def commit(self, state: object, tokens: Sequence[int]) -> None:
        own = _state(state)
        own.rows.clear()
        for token in tokens:
            if own.matcher.ended or not own.matcher.accept(token):
                if not own.matcher.ended and not self._row(own).any():
                    raise InputError(self._stuck())
                raise RuntimeError(f"token {token} was emitted against {self.name}")

    def _goes_on(self, state: GrammarState, walked: Sequence[int], token: int) -> bool:
        """Advance by a token, if the current mask allows it."""
        row = state.rows[tuple(walked)]
        allowed = bool(int(row[token // 32]) >> token % 32 & 1)
        return allowed and not state.matcher.ended and state.matcher.accept(token)

    def _row(self, state: GrammarState) -> Int[Tensor, " words"]:
        """The mask at the matcher's position; all ones behind the end."""
        row = self._silence()
        if not state.matcher.ended:
            state.matcher.fill(row)
        return row

    def _silence(self) -> Int[Tensor, " words"]:
        """The mask of a node that no verifier will reach."""
        return torch.full((self.num_words,), -1, dtype=torch.int32)

    def _stuck(self) -> str:
        return f"no token of the vocabulary goes on with {self.name}; it cannot be fulfilled here"


def _state(state: object) -> GrammarState:
    if not isinstance(state, GrammarState):
        raise TypeError(f"a grammar keeps a GrammarState, got {type(state).__name__}")
    return state
