"""What the engine asks of a language model: slots, extension by segments, commit of one path."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor, device


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Nodes to append behind one slot.

    A slot holds committed tokens and, behind them, pending nodes: what `extend` appended since the last `commit`.
    Pending nodes are numbered from 0 in the order in which they were appended, over all calls.

    Attributes:
        slot: The slot.
        tokens: One token per new node, on any device.
        parents: Pending number of each node's parent; -1 is the newest committed token; parents come first. None
            continues a chain from the newest pending node, or from the committed tokens where nothing is pending.
        logits: Which of the new nodes' logits are wanted; a number wants those of so many of the last ones.
    """

    slot: int
    tokens: Int[Tensor, " nodes"]
    parents: Int[np.ndarray, " nodes"] | None = None
    logits: Literal["all", "last", "none"] | int = "all"

    @property
    def num_wanted(self) -> int:
        """How many of the last nodes' logits are wanted."""
        count = self.tokens.shape[0]
        if isinstance(self.logits, int):
            return min(self.logits, count)
        return {"all": count, "last": min(1, count), "none": 0}[self.logits]


@dataclass(frozen=True, kw_only=True)
class Extension:
    """What a forward gave.

    Attributes:
        logits: Raw logits of the wanted nodes, packed in the order of the segments, in the model's dtype.
        taps: For each tap asked for, the hidden states of ALL new nodes, packed in the order of the segments.
            Tap k is the residual stream that enters decoder layer k; tap `num_layers` is what leaves the last
            layer, before the final norm.
    """

    logits: Float[Tensor, "wanted vocab"]
    taps: Mapping[int, Float[Tensor, "nodes hidden"]]


@runtime_checkable
class LM(Protocol):
    """A causal language model with a slot per sequence.

    Attributes:
        vocab_size: Width of the logits.
        max_context: Most tokens of one slot, pending nodes included.
        max_slots: Most slots at once.
        crops: Whether dropping pending nodes costs nothing; otherwise tokens before them may have to be fed again.
        device: Where tokens are wanted and logits arrive.
    """

    vocab_size: int
    max_context: int
    max_slots: int
    crops: bool
    device: device

    def open(self) -> int:
        """Take a free slot, empty. Raises RuntimeError when none is free."""
        ...

    def length(self, slot: int) -> int:
        """Committed tokens of a slot."""
        ...

    def extend(self, segments: Sequence[Segment], taps: Sequence[int] = ()) -> Extension:
        """Append nodes to several slots in one forward. Each slot at most once; lengths and trees may differ."""
        ...

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        """Per slot, keep the pending nodes of one root path, by number and in order; drop the other pending nodes."""
        ...

    def truncate(self, slot: int, length: int) -> None:
        """Forget committed tokens from `length` on, and all pending nodes."""
        ...

    def release(self, slot: int) -> None:
        """Give the slot back."""
        ...
