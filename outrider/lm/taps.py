"""Hidden states of a model's decoder layers, read by forward hooks that live as long as one forward.

Relied on in transformers (read in 5.17 - 5.23, run in 5.23): `model.get_decoder()`; decoder layers stand in one
`nn.ModuleList`, take the residual stream first or as `hidden_states`, and return it alone or first in a tuple.
(`output_hidden_states` as a list means other things in 5.22 than in 5.23, and no version gives the raw output of the
last layer.)
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.types import InputError


def decoder_layers(model: PreTrainedModel, num_layers: int) -> nn.ModuleList | None:
    """The decoder layers of a model, in order. None where they do not stand in one list, or run more than once."""
    for module in chain(model.get_decoder().modules(), model.base_model.modules()):
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    return None


@contextmanager
def tapped(
    layers: nn.ModuleList | None, taps: Sequence[int]
) -> Iterator[Mapping[int, Float[Tensor, "rows width hidden"]]]:
    """Collect, while the body runs, what enters the layers (tap k) and what leaves the last one (tap `len(layers)`).

    Nothing is copied, and without taps nothing is hooked.

    Raises:
        InputError: There are taps and no layers.
    """
    if layers is None:
        if taps:
            raise InputError(f"hidden states {list(taps)} cannot be read: this model has no one list of decoder layers")
        yield {}
        return
    seen: dict[int, Tensor] = {}
    handles = []
    for k in dict.fromkeys(taps):
        if k == len(layers):
            handles.append(layers[-1].register_forward_hook(_Leaving(seen, k)))
        else:
            handles.append(layers[k].register_forward_pre_hook(_Entering(seen, k), with_kwargs=True))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


class _Entering:
    """Hook that notes what a layer is given."""

    def __init__(self, seen: dict[int, Tensor], tap: int) -> None:
        self.seen, self.tap = seen, tap

    def __call__(self, _: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        self.seen[self.tap] = _stream(args[0] if args else named["hidden_states"])


class _Leaving:
    """Hook that notes what a layer returns."""

    def __init__(self, seen: dict[int, Tensor], tap: int) -> None:
        self.seen, self.tap = seen, tap

    def __call__(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        self.seen[self.tap] = _stream(output[0] if isinstance(output, tuple) else output)


def _stream(hidden: Tensor) -> Tensor:
    if hidden.dim() != 3:
        raise RuntimeError(
            f"taps need layers with one residual stream, these have states of shape {list(hidden.shape)}"
        )
    return hidden
