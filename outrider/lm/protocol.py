"""The interface of language models: slots, extending them by segments, committing one path."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from outrider.lm.hf.embedding_and_head import EmbeddingAndHead


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
        logits: The new nodes whose logits are wanted. A number means that many of the last nodes; a range lists the
            indices of the new nodes.
        features: A vector per new node, which a drafter's head reads with the node's token; None for models that read
            only tokens.
        sees: The pending nodes that each new node sees, old and new, itself included. None: its ancestors and itself.
            Every node sees all committed tokens. This holds for this call only: later children see their ancestors,
            unless their own segment says otherwise.
    """

    slot: int
    tokens: Int[Tensor, " nodes"]
    parents: Int[np.ndarray, " nodes"] | None = None
    logits: Literal["all", "last", "none"] | int | range = "all"
    features: Float[Tensor, "nodes dim"] | None = None
    sees: Bool[np.ndarray, "nodes pending"] | None = None

    @property
    def wanted(self) -> range:
        """The new nodes whose logits are wanted."""
        count = self.tokens.shape[0]
        if isinstance(self.logits, range):
            return self.logits
        if isinstance(self.logits, int):
            return range(count - min(self.logits, count), count)
        return range({"all": 0, "last": max(0, count - 1), "none": count}[self.logits], count)

    @property
    def num_wanted(self) -> int:
        """How many nodes' logits are wanted."""
        return len(self.wanted)


@dataclass(frozen=True, kw_only=True)
class Extension:
    """The results of one forward.

    Attributes:
        logits: Raw logits of the wanted nodes, packed in the order of the segments, in the model's dtype.
        taps: For each tap asked for, the hidden states of ALL new nodes, packed in the order of the segments.
            Tap k is the residual stream that enters decoder layer k; tap `num_layers` is what leaves the last
            layer, before the final norm.
        features: A head's output features of ALL new nodes, packed in the order of the segments; None for other models.
    """

    logits: Float[Tensor, "wanted vocab"]
    taps: Mapping[int, Float[Tensor, "nodes hidden"]]
    features: Float[Tensor, "nodes features"] | None = None


@runtime_checkable
class LM(Protocol):
    """A causal language model with a slot per sequence.

    Attributes:
        vocab_size: Width of the logits.
        max_context: Most tokens of one slot, pending nodes included.
        max_slots: Most slots at once.
        crops: Whether dropping pending nodes costs nothing. Otherwise tokens before them may have to be fed again.
        device: The device of input tokens and of logits.
        dtype: The dtype that the model computes in.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_context(self) -> int: ...
    @property
    def max_slots(self) -> int: ...
    @property
    def crops(self) -> bool: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def chains_only(self) -> str | None:
        """Why the model cannot read a branching tree, as the end of a sentence; None if it can."""
        ...

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """The modules that it computes with, by name."""
        ...

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

    def copy(self, source: int, length: int) -> int:
        """A new slot with the first `length` committed tokens of another. Raises RuntimeError when none is free."""
        ...

    def release(self, slot: int, *, clean: bool = False) -> None:
        """Give the slot back.

        Args:
            clean: Whether to overwrite its cache, because it may hold NaN, which must not reach the next user of the
                slot.
        """
        ...

    def cast(self, dtype: torch.dtype) -> "LM":
        """A copy of the model in another dtype, with its own slots; a quantised model returns itself."""
        ...


@runtime_checkable
class SharesMemory(Protocol):
    """A language model whose slots may not all be as long as they may at once.

    Attributes:
        possible_context: The largest `max_context` that it could be given.
    """

    @property
    def possible_context(self) -> int: ...

    def holds(self, lengths: Sequence[int]) -> bool:
        """Whether slots of so many tokens each, and their pending nodes, fit in memory at once."""
        ...


@runtime_checkable
class Readable(Protocol):
    """A language model whose hidden states and ends drafters may read.

    Attributes:
        num_layers: Decoder layers; taps are numbered from 0 to this.
        hidden_size: Width of the residual stream.
    """

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...

    def embedding_and_head(self) -> EmbeddingAndHead:
        """Its embedding, final norm and output layer. Raises InputError if a drafter cannot use them."""
        ...

    def keys_values(
        self, slot: int, layer: int
    ) -> tuple[Float[Tensor, "length heads dim"], Float[Tensor, "length heads value_dim"]]:
        """A slot's committed keys and values in a layer: read-only views, valid until the model's next call."""
        ...
