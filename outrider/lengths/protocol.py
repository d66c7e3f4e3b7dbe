"""What the loop asks of a length policy: how deep at most, whether to go on, and to be told what happened."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.types import Step


@runtime_checkable
class LengthPolicy(Protocol):
    """Decides when drafting stops, from the past and from rows, never from the tokens that were drawn: a rule that
    looks at a drawn token to decide whether to keep it breaks the law. Immutable; a request's state is a value.
    """

    def open(self) -> object:
        """State for a new request."""
        ...

    def limit(self, state: object) -> int:
        """Deepest draft of the next step."""
        ...

    def more(
        self, states: Sequence[object], owners: Int[np.ndarray, " n"], rows: Float[Tensor, "n vocab"]
    ) -> Bool[np.ndarray, " n"] | None:
        """Which nodes should get children, given the rows these would be drawn from; None means all."""
        ...

    def update(self, state: object, step: Step) -> object:
        """State after a step."""
        ...
