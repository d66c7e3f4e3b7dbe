"""Chains of nodes behind several slots, one node per slot and forward, for any language model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from outrider.lm.protocol import LM, Extension, Segment
from outrider.lm.slots.batch import upload


@runtime_checkable
class ChainForwards(Protocol):
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

    def chain(self, slots: Sequence[int], counts: Sequence[int]) -> ChainForwards:
        """Get ready to extend each slot by `counts[i]` nodes, one per forward, each the child of the one before."""
        ...


def chain(lm: LM, slots: Sequence[int], counts: Sequence[int]) -> ChainForwards:
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Links:
    """What a drafter does between two forwards of a chain. Its functions only compute with tensors on the device, so
    that they can be recorded. They are recorded once for each value, so a drafter has one value for all its chains.

    Attributes:
        logits: The drafter's logits, from the model's.
        next_feature: The vector that a token is read with, from what the model output before it; None: tokens are read
            alone.
        ids: The token of each place in the logits; None: a place is the token.
    """

    logits: Callable[[Float[Tensor, "n vocab"]], Float[Tensor, "n width"]]
    next_feature: Callable[[Float[Tensor, "n hidden"]], Float[Tensor, "n dim"]] | None = None
    ids: Int[Tensor, " width"] | None = None


@dataclass(frozen=True, kw_only=True)
class ChainNoise:
    """How the tokens of a chain are drawn: by `tempered` and `inverse_cdf`.

    Attributes:
        temperatures: One per chain.
        uniforms: Per draw and chain, a number from 0 to 1; any number where the chain has ended.
    """

    temperatures: Float[Tensor, "n 1"]
    uniforms: Float[Tensor, "steps n"]


@dataclass(frozen=True, kw_only=True)
class DrawnTokens:
    """What was drawn behind each token of a chain; arbitrary where the chain had ended.

    Attributes:
        tokens: The tokens.
        rows: The distributions that they were drawn from; None if they are the likeliest ones.
    """

    tokens: Int[Tensor, "steps n"]
    rows: Float[Tensor, "steps n width"] | None


@runtime_checkable
class DrawsChains(Protocol):
    """A language model that can run a whole chain, with the draws in between.

    Attributes:
        replays: Whether it can.
    """

    @property
    def replays(self) -> bool: ...

    def draw_chain(
        self,
        slots: Sequence[int],
        counts: Sequence[int],
        tokens: Int[Tensor, " n"],
        features: Float[Tensor, "n dim"] | None,
        links: Links,
        noise: ChainNoise | None,
    ) -> DrawnTokens | None:
        """Extend each slot by `counts[i]` nodes; None where it cannot."""
        ...


class LinkedChain:
    """A drafter's chains: forward by forward, or in one go. Changes in place.

    Args:
        lm: The language model.
        slots: The slot of each chain.
        counts: How many forwards each of them has.
        links: What the drafter does between two forwards.
        head_output: What the model output before each chain's first token; None where tokens are read alone.
    """

    def __init__(
        self,
        lm: LM,
        slots: Sequence[int],
        counts: Sequence[int],
        links: Links,
        head_output: Float[Tensor, "n hidden"] | None = None,
    ) -> None:
        self._lm, self._slots, self._counts, self._links = lm, slots, counts, links
        self._head_output, self._left = head_output, np.array(counts)
        self._follow = chain(lm, slots, counts)

    def __call__(self, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n width"]:
        """The logits after the next token of each chain that goes on."""
        left, head_output = self._left, self._head_output
        if head_output is not None and not (left > 0).all():
            head_output = head_output[upload([np.flatnonzero(left > 0)], head_output.device)[0]]
        extension = self._follow(tokens, self._features(head_output))
        self._left = left[left > 0] - 1
        if head_output is not None:
            if extension.features is None:
                raise TypeError("the extension of a head must hold features")
            self._head_output = extension.features
        return self._links.logits(extension.logits)

    @property
    def in_one_go(self) -> bool:
        """Whether `draw` may work."""
        return max(self._counts) > 0 and getattr(self._lm, "replays", False)

    def draw(self, tokens: Int[Tensor, " n"], noise: ChainNoise | None) -> DrawnTokens | None:
        """Run all forwards, and draw a token behind each; None where that is not possible. Then nothing has changed.

        Args:
            tokens: The first token of each chain.
            noise: How tokens are drawn; None takes the likeliest ones.
        """
        lm, features = cast(DrawsChains, self._lm), self._features(self._head_output)
        return lm.draw_chain(self._slots, self._counts, tokens, features, self._links, noise)

    def _features(self, head_output: Float[Tensor, "n hidden"] | None) -> Float[Tensor, "n dim"] | None:
        """The vectors that the next tokens are read with."""
        if head_output is None or self._links.next_feature is None:
            return None
        return self._links.next_feature(head_output)
