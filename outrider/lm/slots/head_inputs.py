"""What a drafter's head reads in a forward, and where its layers keep their keys and values."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor


@runtime_checkable
class KVCache(Protocol):
    """Stores keys and values of a head's attention layers. Drafting uses a slot cache; training uses another."""

    def update(
        self, keys: Float[Tensor, "rows heads width dim"], values: Float[Tensor, "rows heads width dim"], layer_idx: int
    ) -> tuple[Float[Tensor, "rows heads keys dim"], Float[Tensor, "rows heads keys dim"]]:
        """Store the new keys and values of a layer. Returns all keys and values that its queries may see."""
        ...


@dataclass(frozen=True, kw_only=True)
class HeadInputs:
    """What a head reads in a forward.

    Attributes:
        tokens: The token of each node.
        features: The feature of each node; None if they have none, as the unknown positions of a block.
        positions: Where the nodes stand in their texts.
        mask: Which keys of the cache each node sees, the new ones included.
        cache: Where each layer stores its keys and values.
    """

    tokens: Int[Tensor, "rows width"]
    features: Float[Tensor, "rows width dim"] | None
    positions: Int[Tensor, "rows width"]
    mask: Bool[Tensor, "rows 1 width keys"]
    cache: KVCache

    @property
    def needed_features(self) -> Float[Tensor, "rows width dim"]:
        """The features, for a head whose nodes all have one."""
        if self.features is None:
            raise TypeError("a node of this head has a feature")
        return self.features
