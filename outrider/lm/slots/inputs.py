"""The inputs and results of one forward, and the interface of the files that make and unpack them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from outrider.lm.protocol import Extension
from outrider.lm.slots.batch import ForwardBatch, Padded
from outrider.lm.slots.layout import Layout
from outrider.lm.slots.window import Window


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The inputs of one forward.

    Attributes:
        batch: The new nodes, padded.
        positions: Position of each column's node.
        masks: Which keys each column sees.
        window: What the forward reads and extends.
        columns: The columns whose logits are computed, at least.
        causal: Whether the nodes are the last ones of what is read, so that layers that see all before need no mask.
        rows: The row of the cache of each row, where the forward may be replayed.
        places: Where the new nodes go, counted from the begin of the cache; None: the forward is not to be replayed.
        layout: Where the nodes of a forward without padding stand in the rows of the masks. Such a forward has one row,
            and its columns are the nodes of all slots. None: the nodes are padded.
    """

    batch: ForwardBatch | Padded
    positions: Int[Tensor, "rows width"]
    masks: object
    window: Window
    columns: Int[np.ndarray, " columns"]
    causal: bool = False
    rows: Sequence[int] = ()
    places: Int[Tensor, "rows width"] | None = None
    layout: Layout | None = None


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The results of one forward, padded.

    Attributes:
        logits: Logits of the columns.
        columns: The columns that were computed, at least the wanted ones.
        taps: The hidden states that were asked for.
        features: A head's output features.
    """

    logits: Float[Tensor, "rows columns vocab"]
    columns: Int[np.ndarray, " columns"]
    taps: Mapping[int, Float[Tensor, "rows width hidden"]] = field(default_factory=dict)
    features: Float[Tensor, "rows width features"] | None = None


@dataclass(frozen=True, kw_only=True)
class PreparedForward(ABC):
    """One forward that is ready to be computed.

    Attributes:
        inputs: Its inputs.
    """

    inputs: Inputs

    @abstractmethod
    def extension(self, outputs: Outputs, vocab_size: int) -> Extension:
        """What its outputs say of its nodes, in the caller's order. Logits are cut to a width."""
