"""Chains of nodes behind several slots, one node per slot and forward, for any language model."""

from collections.abc import Sequence
from typing import Protocol, cast, runtime_checkable

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from outrider.lm.protocol import LM, Extension, Segment


@runtime_checkable
class Chain(Protocol):
    """Forwards over one new node per slot. It is valid as long as the model is not used otherwise."""

    def __call__(self, tokens: Int[Tensor, " n"], features: Float[Tensor, "n dim"] | None = None) -> Extension:
        """Append the next node to each slot whose chain has not ended. The logits are those after these nodes.

        Args:
            tokens: One token for each of these slots, in their order.
            features: The vector that a head reads with each token.
        """
        ...


@runtime_checkable
class Chaining(Protocol):
    """A language model that gets all forwards of a chain ready at once."""

    def chain(self, slots: Sequence[int], counts: Sequence[int]) -> Chain:
        """Get ready to extend each slot by `counts[i]` nodes, one per forward, each the child of the one before."""
        ...


def chain(lm: LM, slots: Sequence[int], counts: Sequence[int]) -> Chain:
    """A chain of `counts[i]` nodes behind each slot: got ready at once if the model can, otherwise forward by forward.

    Example:
        >>> from outrider.lm.tabular import TabularLM
        >>> import torch
        >>> lm = TabularLM(lambda prefix: np.array([0.25, 0.75]), vocab_size=2)
        >>> follow = chain(lm, [lm.open()], [2])
        >>> follow(torch.tensor([1])).logits.exp()
        tensor([[0.2500, 0.7500]], dtype=torch.float64)
    """
    # Asking a protocol takes twenty times as long as asking for an attribute.
    return cast(Chaining, lm).chain(slots, counts) if hasattr(lm, "chain") else _Stepwise(lm, slots, counts)


class _Stepwise:
    """A chain whose forwards are extensions by one node, made one by one; changes in place."""

    def __init__(self, lm: LM, slots: Sequence[int], counts: Sequence[int]) -> None:
        self._lm = lm
        self._slots = np.array(slots)
        self._left = np.array(counts)

    def __call__(self, tokens: Int[Tensor, " n"], features: Float[Tensor, "n dim"] | None = None) -> Extension:
        alive = self._slots[self._left > 0].tolist()
        self._left -= 1
        return self._lm.extend(
            [
                Segment(slot=slot, tokens=tokens[i : i + 1], features=None if features is None else features[i : i + 1])
                for i, slot in enumerate(alive)
            ]
        )
