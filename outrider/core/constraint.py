"""What narrows the tokens of an output: the protocol of grammars and of other automata."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxtyping import Int
from torch import Tensor


@runtime_checkable
class Constraint(Protocol):
    """Which tokens may come next, given the output so far: a grammar, or any automaton over tokens. Immutable.

    Masks are packed, 32 tokens to a word, as `outrider.core.sampling.pack` makes them: a bit is 1 where the token may
    come.
    """

    def open(self) -> object:
        """State of a new request, before its first token. It may change in place, but only `commit` may change the
        masks.
        """
        ...

    def masks(self, state: object, tokens: Sequence[int], parents: Sequence[int]) -> Int[Tensor, "nodes words"]:
        """The tokens that may follow each node of a draft, as packed masks on the host.

        At least one token must be allowed after every node that is itself allowed. After all other nodes, and after an
        end token, any row is fine; all ones is best.

        Args:
            tokens: Token of each node; node 0 is the root, whose token is the newest committed one.
            parents: Number of each node's parent, -1 for the root; parents come first.
        """
        ...

    def commit(self, state: object, tokens: Sequence[int]) -> None:
        """Take in emitted tokens, in order."""
        ...
