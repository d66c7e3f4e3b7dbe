"""What the loop asks of a length policy: how deep at most, how far to go on, and to be told what happened."""

from collections.abc import Sequence
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from outrider.trees.protocol import Level
from outrider.types import Step


@runtime_checkable
class LengthPolicy(Protocol):
    """Decides when drafting stops, from the past and from rows, never from the tokens that were drawn: a rule that
    looks at a drawn token to decide whether to keep it breaks the law. Immutable; a request's state is a value.

    Attributes:
        constant: Whether every draft is meant to be equally long.
        lossy: Why the output has another law than the target's, and what to use instead; None where it has the same.
    """

    constant: ClassVar[bool]

    @property
    def lossy(self) -> str | None: ...

    def open(self) -> object:
        """State for a new request."""
        ...

    def limit(self, state: object) -> int:
        """Deepest draft of the next step."""
        ...

    def reach(self, states: Sequence[object], level: Level) -> Int[np.ndarray, " n"] | None:
        """How many more tokens may follow each node of a level, given the scores of what these may be: 0 stops
        there, 1 keeps one more. None sets no bound. Asked of drafters that have rows, before a token is drawn.
        """
        ...

    def update(self, state: object, step: Step) -> object:
        """State after a step."""
        ...


@runtime_checkable
class BatchPolicy(Protocol):
    """A length policy that shares one budget of target nodes among the chains of a batch, after they were drafted."""

    def note(self, level: Level, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n 2"]:
        """What `share` will need of the tokens that were drawn at a level."""
        ...

    def share(self, notes: Float[np.ndarray, "requests depth 2"]) -> Int[np.ndarray, " requests"]:
        """How many drafted tokens of each request to verify; -inf stands where a request drafted fewer."""
        ...
