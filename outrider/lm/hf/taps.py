"""Hidden states of a model's decoder layers, read by forward hooks.

Relied on in transformers (read in 5.17 - 5.23, run in 5.23): decoder layers take the residual stream first or as
`hidden_states`, and return it alone or first in a tuple.
(`output_hidden_states` as a list means other things in 5.22 than in 5.23, and no version gives the raw output of the
last layer.)
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from outrider.core.types import InputError


def attach(layers: nn.ModuleList | None, taps: Sequence[int], seen: dict[int, Tensor]) -> list[RemovableHandle]:
    """Let a model note in `seen`, at every forward, what enters its layers (tap k) and what leaves the last one (tap
    `len(layers)`). Nothing is copied.

    Raises:
        InputError: There are taps and no layers.
    """
    handles = []
    if layers is None:
        if taps:
            raise InputError(f"hidden states {list(taps)} cannot be read: this model has no one list of decoder layers")
        return []
    for k in dict.fromkeys(taps):
        if k == len(layers):
            handles.append(layers[-1].register_forward_hook(_Leaving(seen, k)))
        else:
            handles.append(layers[k].register_forward_pre_hook(_Entering(seen, k), with_kwargs=True))
    return handles


@contextmanager
def tapped(
    layers: nn.ModuleList | None, taps: Sequence[int]
) -> Iterator[Mapping[int, Float[Tensor, "rows width hidden"]]]:
    """Collect what `attach` notes while the body runs. Without taps nothing is hooked."""
    seen: dict[int, Tensor] = {}
    handles = attach(layers, taps, seen)
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
