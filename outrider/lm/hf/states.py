"""The states of recurrent layers, as transformers keeps them during one forward.

Relied on in transformers (5.17 - 5.23, run in 5.23): `DynamicCache(config=...).layers[i]` of a recurrent layer has
dicts `conv_states` and `recurrent_states` (state number -> tensor `[batch, ...]`, changed in place), the flags
`has_previous_state`, `is_conv_states_initialized` and `is_recurrent_states_initialized`, and `conv_kernel_size`, which
the first forward sets. RecurrentGemma keeps the same things on its modules: `conv1d_state` of a recurrent block and
`recurrent_states` of its `rg_lru`.
"""

from collections.abc import MutableMapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

State = tuple[Tensor, ...]
"""What all recurrent layers of a model remember of one sequence: tensors with a batch axis of 1, never changed."""


@runtime_checkable
class AttentionCache(Protocol):
    """Keeps keys and values of attention layers."""

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]: ...


class StateCache(DynamicCache):  # type: ignore[misc]
    """transformers' own cache for a model, except that keys and values go to a cache of our own.

    Before a forward `put` gives every row its state, afterwards `take` fetches the new ones. States that were put are
    copied into the batch, so they may be kept as they are for as long as they are wanted.

    Args:
        model: The model whose layers are served.
        kv_cache: Where keys and values go; it may be replaced.
    """

    def __init__(self, model: PreTrainedModel, kv_cache: AttentionCache) -> None:
        super().__init__(config=model.config)
        self.kv_cache = kv_cache
        self._linear = [layer for layer in self.layers if hasattr(layer, "recurrent_states")]
        self._places: list[tuple[MutableMapping[Any, Any], Any]] = []
        for layer in self._linear:
            self._places += [(layer.conv_states, i) for i in layer.conv_states]
            self._places += [(layer.recurrent_states, i) for i in layer.recurrent_states]
        for module in model.modules():
            if hasattr(module, "conv1d_state") and hasattr(module, "rg_lru"):
                self._places += [(vars(module), "conv1d_state"), (vars(module.rg_lru), "recurrent_states")]
        self._kept: list[tuple[MutableMapping[Any, Any], Any]] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object) -> Any:
        """Called by transformers: keys and values of an attention layer."""
        return self.kv_cache.update(key_states, value_states, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Called by transformers; lengths differ by row, and with explicit positions the answer is not used."""
        return 0

    def put(self, states: Sequence[State | None]) -> None:
        """Give each row of the next forward its state: all rows have one, or none has (fresh sequences)."""
        fresh = states[0] is None
        for layer in self._linear:
            for i in layer.conv_states:
                layer.has_previous_state[i] = not fresh
                if fresh:
                    layer.is_conv_states_initialized[i] = layer.is_recurrent_states_initialized[i] = False
        if fresh:
            self._clear()
            return
        rows = cast(Sequence[State], states)
        for (place, key), tensors in zip(self._kept or [], zip(*rows, strict=True), strict=True):
            place[key] = torch.cat(tensors)
        for layer in self._linear:
            layer.is_conv_states_initialized.update({i: t is not None for i, t in layer.conv_states.items()})
            layer.is_recurrent_states_initialized.update({i: t is not None for i, t in layer.recurrent_states.items()})

    def take(self, rows: int) -> list[State]:
        """What each row remembers after the forward; nothing stays behind in the cache or on the model."""
        if self._kept is None:
            self._kept = [(place, key) for place, key in self._places if place[key] is not None]
        split = [place[key].split(1) for place, key in self._kept]
        self._clear()
        return [tuple(parts[r] for parts in split) for r in range(rows)]

    def _clear(self) -> None:
        for place, key in self._places:
            place[key] = None
