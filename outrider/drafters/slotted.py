"""The base of drafters that guess with a language model over slots: a draft model or a head."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from outrider.core.types import Frontier, Running
from outrider.drafters.stateful import StatefulDrafter
from outrider.lm.protocol import LM, Segment


@dataclass(kw_only=True)
class SlotState:
    """One request's slot of the language model; changes in place.

    Attributes:
        slot: Where the language model keeps the request.
    """

    slot: int


@dataclass(kw_only=True)
class TreeState(SlotState):
    """The state of a drafter that runs its language model on the nodes of the growing tree; changes in place.

    Attributes:
        fed: For each expanded node, its pending number in the slot. The root has none, because it is committed.
    """

    fed: dict[int, int] = field(default_factory=dict)


Slotted = TypeVar("Slotted", bound=SlotState)


@dataclass(frozen=True, kw_only=True)
class SlottedDrafter(StatefulDrafter[Slotted]):
    """Guess with a language model that has a slot for each request. The state of a request is a `SlotState`.

    Attributes:
        lm: The language model.
    """

    keeps_cache: ClassVar[bool] = True
    state: ClassVar[type[Any]] = SlotState

    lm: LM

    @property
    def max_context(self) -> int | None:
        return self.lm.max_context

    @property
    def device(self) -> torch.device:
        return self.lm.device

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        return self.lm.modules

    def close(self, state: object) -> None:
        self.lm.release(self.checked(state).slot)


def tree_segments(
    state_of: Callable[[Running], TreeState],
    states: Sequence[Running],
    frontier: Frontier,
    device: torch.device,
    features: Float[Tensor, "n dim"] | None = None,
) -> list[Segment]:
    """One segment per request for the nodes of a frontier. Notes the pending numbers that the nodes will get.

    Args:
        state_of: What the drafter keeps of a request. Requests of the batch without a node may have another drafter.
        device: Where the language model is.
        features: The vector that the language model reads with each node.
    """
    tokens, parents, nodes = frontier.tokens.to(device), frontier.parents.tolist(), frontier.nodes.tolist()
    starts, segments = np.flatnonzero(np.diff(frontier.owners, prepend=-1)).tolist(), []
    for first, end in zip(starts, [*starts[1:], len(nodes)], strict=True):
        drafter_state = state_of(states[int(frontier.owners[first])])
        above = np.array([drafter_state.fed.get(parent, -1) for parent in parents[first:end]])
        for node in nodes[first:end]:
            drafter_state.fed[node] = len(drafter_state.fed)
        segment = Segment(slot=drafter_state.slot, tokens=tokens[first:end], parents=above)
        segments.append(segment if features is None else replace(segment, features=features[first:end]))
    return segments
